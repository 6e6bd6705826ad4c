// The layers of a decoder of the Llama family over one iteration's tokens, as plain C functions.
//
// Everything but attention sees all tokens of all requests as the rows of one matrix (selective batching, ORCA 3.2).
// Activations are float32 between the products and 8-bit inside them; K and V are bfloat16. One team of threads goes
// through all operations of a call; operations are separated by the team's barriers.
#include <omp.h>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "pack.h"

using namespace orca;

extern "C" {

struct OrcaLlamaLayer {
  Norm input_norm;
  Packed qkv;
  const float* qkv_bias;
  Norm q_norm, k_norm;  // of single heads
  Packed o;
  Norm post_norm;
  Packed gate_up;
  Packed down;
  KvLayer kv;
};

struct OrcaLlama {
  Shape shape;
  int64_t hidden_size, intermediate_size;
  const float* cos;  // [max_model_len, head_dim / 2]
  const float* sin;
};

// Bytes of memory that a call with so many tokens needs.
int64_t orca_workspace_bytes(const OrcaLlama* model, int64_t num_tokens);
}

namespace {

struct Workspace {
  float* qkv;       // [T, (heads + 2 kv_heads) * dim]
  float* attended;  // [T, heads * dim]
  float* gate_up;   // [T, 2 * intermediate]
  Rows rows;        // of hidden size or of attended
  Rows inner;       // of intermediate size

  static Rows take_rows(uint8_t*& p, int64_t num_rows, int64_t k) {
    Rows rows;
    rows.k = k;
    rows.q = take<int8_t>(p, num_rows * k);
    rows.scale = take<float>(p, num_rows * (k / kGroup));
    rows.sum = take<float>(p, num_rows * (k / kGroup));
    return rows;
  }

  template <typename T>
  static T* take(uint8_t*& p, int64_t count) {
    T* taken = reinterpret_cast<T*>(p);
    p += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return taken;
  }

  Workspace(const OrcaLlama& model, int64_t num_tokens, uint8_t*& p) {
    const Shape& shape = model.shape;
    const int64_t attended_size = shape.num_heads * shape.head_dim;
    qkv = take<float>(p, num_tokens * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim);
    attended = take<float>(p, num_tokens * attended_size);
    gate_up = take<float>(p, num_tokens * 2 * model.intermediate_size);
    rows = take_rows(p, num_tokens, std::max(model.hidden_size, attended_size));
    inner = take_rows(p, num_tokens, model.intermediate_size);
  }
};

// out (+)= attention of the normalised hidden state; called by every thread of a team.
void attention_part(const OrcaLlama& model, const OrcaLlamaLayer& layer, const Step& step, const std::vector<AttentionItem>& items,
                    const float* hidden, float* out, bool add, Workspace& ws, float* line) {
  const Shape& shape = model.shape;
  const int64_t dim = shape.head_dim, num_heads = shape.num_heads, num_kv_heads = shape.num_kv_heads;
  const int64_t width = (num_heads + 2 * num_kv_heads) * dim;
  Rows rows = ws.rows;
  rows.k = model.hidden_size;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    norm_row(hidden + t * model.hidden_size, model.hidden_size, layer.input_norm, line);
    quantize_row(line, rows, t);
  }
  linear_in_team(layer.qkv, rows, step.num_tokens, {ws.qkv, width, layer.qkv_bias, false});
#pragma omp for schedule(static)
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    const Angles angles{model.cos + step.positions[t] * (dim / 2), model.sin + step.positions[t] * (dim / 2)};
    float* q = ws.qkv + t * width;
    float* k = q + num_heads * dim;
    rotate_and_store(q, k, k + num_kv_heads * dim, angles, layer.q_norm, layer.k_norm, step.slots[t], shape, layer.kv);
  }
  attention_in_team(step, shape, items, layer.kv, ws.qkv, width, ws.attended, num_heads * dim, 1.0f / std::sqrt(static_cast<float>(dim)));
  rows.k = num_heads * dim;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < step.num_tokens; ++t) quantize_row(ws.attended + t * rows.k, rows, t);
  linear_in_team(layer.o, rows, step.num_tokens, {out, model.hidden_size, nullptr, add});
}

// out (+)= MLP of the normalised hidden state; called by every thread of a team.
void mlp_part(const OrcaLlama& model, const OrcaLlamaLayer& layer, int64_t num_tokens, const float* hidden, float* out, bool add,
              Workspace& ws, float* line) {
  const int64_t inner = model.intermediate_size;
  Rows rows = ws.rows;
  rows.k = model.hidden_size;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < num_tokens; ++t) {
    norm_row(hidden + t * model.hidden_size, model.hidden_size, layer.post_norm, line);
    quantize_row(line, rows, t);
  }
  linear_in_team(layer.gate_up, rows, num_tokens, {ws.gate_up, 2 * inner, nullptr, false});
#pragma omp for schedule(static)
  for (int64_t t = 0; t < num_tokens; ++t) {
    const float* gate = ws.gate_up + t * 2 * inner;
    silu_mul_row(gate, gate + inner, inner, line);
    quantize_row(line, ws.inner, t);
  }
  linear_in_team(layer.down, ws.inner, num_tokens, {out, model.hidden_size, nullptr, add});
}

int64_t longest_line(const OrcaLlama& model) { return std::max(model.hidden_size, model.intermediate_size); }

}  // namespace

extern "C" {

int64_t orca_workspace_bytes(const OrcaLlama* model, int64_t num_tokens) {
  uint8_t* end = nullptr;
  Workspace(*model, num_tokens, end);
  return reinterpret_cast<int64_t>(end);
}

// All layers: hidden [num_tokens, hidden_size] float32 becomes the last layer's output.
void orca_llama_layers(const OrcaLlama* model, const OrcaLlamaLayer* layers, int64_t num_layers, const Step* step, float* hidden,
                       uint8_t* workspace, int num_threads) {
  Workspace ws(*model, step->num_tokens, workspace);
  std::vector<AttentionItem> items;
  attention_items(*step, model->shape, items);
#pragma omp parallel num_threads(num_threads)
  {
    std::vector<float> line(longest_line(*model));
    for (int64_t i = 0; i < num_layers; ++i) {
      attention_part(*model, layers[i], *step, items, hidden, hidden, true, ws, line.data());
      mlp_part(*model, layers[i], step->num_tokens, hidden, hidden, true, ws, line.data());
    }
  }
}

// One layer's attention, or MLP, of this rank alone: out is its part of the sum over ranks.
void orca_llama_attention(const OrcaLlama* model, const OrcaLlamaLayer* layer, const Step* step, const float* hidden, float* out,
                          uint8_t* workspace, int num_threads) {
  Workspace ws(*model, step->num_tokens, workspace);
  std::vector<AttentionItem> items;
  attention_items(*step, model->shape, items);
#pragma omp parallel num_threads(num_threads)
  {
    std::vector<float> line(longest_line(*model));
    attention_part(*model, *layer, *step, items, hidden, out, false, ws, line.data());
  }
}

void orca_llama_mlp(const OrcaLlama* model, const OrcaLlamaLayer* layer, int64_t num_tokens, const float* hidden, float* out,
                    uint8_t* workspace, int num_threads) {
  Workspace ws(*model, num_tokens, workspace);
#pragma omp parallel num_threads(num_threads)
  {
    std::vector<float> line(longest_line(*model));
    mlp_part(*model, *layer, num_tokens, hidden, out, false, ws, line.data());
  }
}

// y [num_rows, n] = x [num_rows, k] times the weights; norm_weight null: x as it is. Rows go through `workspace`, of
// orca_linear_workspace_bytes.
void orca_linear(const Packed* w, const float* x, int64_t num_rows, const float* norm_weight, double eps, float* y, uint8_t* workspace,
                 int num_threads) {
  Rows rows = Workspace::take_rows(workspace, num_rows, w->k);
#pragma omp parallel num_threads(num_threads)
  {
    std::vector<float> line(w->k);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_rows; ++t) {
      if (norm_weight) norm_row(x + t * w->k, w->k, {norm_weight, eps}, line.data());
      quantize_row(norm_weight ? line.data() : x + t * w->k, rows, t);
    }
    linear_in_team(*w, rows, num_rows, {y, w->n, nullptr, false});
  }
}

int64_t orca_linear_workspace_bytes(int64_t num_rows, int64_t k) {
  uint8_t* end = nullptr;
  Workspace::take_rows(end, num_rows, k);
  return reinterpret_cast<int64_t>(end);
}

// Packs w [n, k] float32 into data; rows beyond n are zeros. Returns the largest error relative to its group's largest weight.
float orca_pack(const float* w, int64_t n, int64_t k, int64_t bits, uint8_t* data, int num_threads) {
  const Packed packed{data, n, k, bits};
  float worst = 0.0f;
#pragma omp parallel for schedule(static) reduction(max : worst) num_threads(num_threads)
  for (int64_t tile = 0; tile < (n + kLanes - 1) / kLanes; ++tile)
    for (int64_t lane = 0; lane < kLanes; ++lane)
      for (int64_t g = 0; g < k / kGroup; ++g) {
        const int64_t row = tile * kLanes + lane;
        const float zeros[kGroup] = {};
        const float* from = row < n ? w + row * k + g * kGroup : zeros;
        const float error = pack_group(from, bits, lane, data + tile * packed.tile_bytes() + g * packed.group_bytes());
        float peak = 0.0f;
        for (int i = 0; i < kGroup; ++i) peak = std::max(peak, std::fabs(from[i]));
        if (peak > 0.0f) worst = std::max(worst, error / peak);
      }
  return worst;
}

// One row of a packed matrix as float32, for each of some row numbers: out [count, k].
void orca_gather_rows(const Packed* w, const int64_t* row_numbers, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t lane = row_numbers[i] % kLanes;
    const uint8_t* group = w->data + row_numbers[i] / kLanes * w->tile_bytes();
    float* to = out + i * w->k;
    for (int64_t g = 0; g < w->k / kGroup; ++g, group += w->group_bytes(), to += kGroup) {
      const uint8_t* constants = group + w->bits * 64;
      const float scale = half_to_float(constants + 2 * lane), offset = half_to_float(constants + 32 + 2 * lane);
      for (int64_t column = 0; column < kGroup; ++column) {
        const int64_t half = w->bits == 4 ? column % 16 : column;
        const uint8_t byte = group[half / 4 * 64 + 4 * lane + half % 4];
        const int q = w->bits == 8 ? byte : column < 16 ? byte & 15 : byte >> 4;
        to[column] = scale * static_cast<float>(q) + offset;
      }
    }
  }
}
}
