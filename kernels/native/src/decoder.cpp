// The layers of a decoder of the Llama family over one iteration's tokens, as plain C functions.
//
// Everything but attention sees all tokens of all requests as the rows of one matrix (selective batching, ORCA 3.2).
// Activations are float32 between the products and 8-bit inside them; K and V are bfloat16. One team of threads goes
// through all operations of a call; operations are separated by the team's barriers.
#include <omp.h>

#include <chrono>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

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

// Where the time of a call went, nanoseconds, added up.
struct OrcaTimings {
  int64_t products, attention, other;
};

// Bytes of memory that a call with so many tokens needs.
int64_t orca_workspace_bytes(const OrcaLlama* model, int64_t num_tokens);
}

namespace {

struct Workspace {
  float* qkv;       // [T, (heads + 2 kv_heads) * dim]
  float* attended;  // [T, heads * dim]
  Rows rows;        // of hidden size or of attended
  Rows inner;       // of intermediate size

  static Rows take_rows(uint8_t*& p, int64_t num_rows, int64_t size) {
    Rows rows;
    rows.k = padded(size, kRowGroup);
    num_rows = padded(num_rows, kRowsAtOnce);  // products may read beyond the last
    rows.q = take<int8_t>(p, num_rows * rows.k);
    rows.scale = take<float>(p, num_rows * (rows.k / kRowGroup));
    rows.start = take<int32_t>(p, num_rows * (rows.k / kRowGroup));
    rows.sum = take<float>(p, num_rows * (rows.k / kGroup));
    return rows;
  }

  template <typename T>
  static T* take(uint8_t*& p, int64_t count) {
    T* taken = reinterpret_cast<T*>(p);
    p += padded(count * static_cast<int64_t>(sizeof(T)), 64);
    return taken;
  }

  Workspace(const OrcaLlama& model, int64_t num_tokens, uint8_t*& p) {
    const Shape& shape = model.shape;
    const int64_t attended_size = shape.num_heads * shape.head_dim;
    qkv = take<float>(p, num_tokens * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim);
    attended = take<float>(p, num_tokens * attended_size);
    rows = take_rows(p, num_tokens, std::max(model.hidden_size, attended_size));
    inner = take_rows(p, num_tokens, model.intermediate_size);
  }
};

// The same memory for rows of another size.
Rows of_size(Rows rows, int64_t size) {
  rows.k = padded(size, kRowGroup);
  return rows;
}

// Adds the time since the last lap to one of the sums: what a team's first thread sees, barriers included.
class Stopwatch {
 public:
  explicit Stopwatch(OrcaTimings* timings) : timings_(omp_get_thread_num() == 0 ? timings : nullptr) {
    if (timings_) last_ = now();
  }
  void lap(int64_t OrcaTimings::* part) {
    if (!timings_) return;
    const int64_t time = now();
    timings_->*part += time - last_;
    last_ = time;
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  OrcaTimings* timings_;
  int64_t last_ = 0;
};

// Normalised rows in the form that products take; called by every thread of a team.
void norm_in_team(const float* hidden, int64_t num_tokens, int64_t size, const Norm& norm, const Rows& rows, float* line) {
#pragma omp for schedule(static)
  for (int64_t t = 0; t < num_tokens; ++t) {
    norm_row(hidden + t * size, size, norm, line);
    quantize_row(line, size, rows, t);
  }
}

// SiLU(gate) * up of normalised rows, in the form that the next product takes; called by every thread of a team. A piece of
// the work is a group of 64 columns for some rows, which never leaves the caches as float32. `size` is a multiple of 32, so
// that up begins with a pair of tiles.
void gate_up_in_team(const Packed& gate_up, const Rows& rows, int64_t num_tokens, int64_t size, const Rows& inner) {
  const int64_t groups = inner.k / kRowGroup, blocks = (num_tokens + kRowBlock - 1) / kRowBlock;
  alignas(64) float gate[kRowBlock][kRowGroup], up[kRowBlock][kRowGroup];
#pragma omp for schedule(dynamic, 1)
  for (int64_t item = 0; item < blocks * groups; ++item) {
    const int64_t group = item % groups, column = group * kRowGroup, columns = std::min<int64_t>(kRowGroup, size - column);
    const int64_t row = item / groups * kRowBlock, end = std::min(num_tokens, row + kRowBlock);
    const Target to_gate{gate[0], kRowGroup, nullptr, false, row, column}, to_up{up[0], kRowGroup, nullptr, false, row, size + column};
    for (int64_t c = 0; c < columns; c += kPair * kLanes) {
      multiply_pair(gate_up, rows, row, end, (column + c) / kLanes, are_few(num_tokens), to_gate);
      multiply_pair(gate_up, rows, row, end, (size + column + c) / kLanes, are_few(num_tokens), to_up);
    }
    for (int64_t t = row; t < end; ++t) {
      silu_mul_row(gate[t - row], up[t - row], columns, gate[t - row]);
      quantize_columns(gate[t - row], columns, inner, t, group);
    }
  }
}

// out (+)= attention of the normalised hidden state; called by every thread of a team.
void attention_part(const OrcaLlama& model, const OrcaLlamaLayer& layer, const Step& step, const std::vector<AttentionItem>& items,
                    const float* hidden, float* out, bool add, Workspace& ws, float* line, Stopwatch& watch) {
  const Shape& shape = model.shape;
  const int64_t dim = shape.head_dim, attended_size = shape.num_heads * dim;
  const int64_t width = attended_size + 2 * shape.num_kv_heads * dim;
  const Rows rows = of_size(ws.rows, model.hidden_size), attended = of_size(ws.rows, attended_size);
  norm_in_team(hidden, step.num_tokens, model.hidden_size, layer.input_norm, rows, line);
  watch.lap(&OrcaTimings::other);
  linear_in_team(layer.qkv, rows, step.num_tokens, {ws.qkv, width, layer.qkv_bias});
  watch.lap(&OrcaTimings::products);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    const Angles angles{model.cos + step.positions[t] * (dim / 2), model.sin + step.positions[t] * (dim / 2)};
    float* q = ws.qkv + t * width;
    float* k = q + attended_size;
    rotate_and_store(q, k, k + shape.num_kv_heads * dim, angles, layer.q_norm, layer.k_norm, step.slots[t], shape, layer.kv);
  }
  watch.lap(&OrcaTimings::other);
  attention_in_team(step, shape, items, layer.kv, ws.qkv, width, ws.attended, attended_size, 1.0f / std::sqrt(static_cast<float>(dim)));
  watch.lap(&OrcaTimings::attention);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < step.num_tokens; ++t) quantize_row(ws.attended + t * attended_size, attended_size, attended, t);
  watch.lap(&OrcaTimings::other);
  linear_in_team(layer.o, attended, step.num_tokens, {out, model.hidden_size, nullptr, add});
  watch.lap(&OrcaTimings::products);
}

// out (+)= MLP of the normalised hidden state; called by every thread of a team.
void mlp_part(const OrcaLlama& model, const OrcaLlamaLayer& layer, int64_t num_tokens, const float* hidden, float* out, bool add,
              Workspace& ws, float* line, Stopwatch& watch) {
  const Rows rows = of_size(ws.rows, model.hidden_size);
  norm_in_team(hidden, num_tokens, model.hidden_size, layer.post_norm, rows, line);
  watch.lap(&OrcaTimings::other);
  gate_up_in_team(layer.gate_up, rows, num_tokens, model.intermediate_size, ws.inner);
  linear_in_team(layer.down, ws.inner, num_tokens, {out, model.hidden_size, nullptr, add});
  watch.lap(&OrcaTimings::products);
}

}  // namespace

extern "C" {

int64_t orca_workspace_bytes(const OrcaLlama* model, int64_t num_tokens) {
  uint8_t* end = nullptr;
  Workspace(*model, num_tokens, end);
  return reinterpret_cast<int64_t>(end);
}

// All layers: hidden [num_tokens, hidden_size] float32 becomes the last layer's output. `timings` may be null.
void orca_llama_layers(const OrcaLlama* model, const OrcaLlamaLayer* layers, int64_t num_layers, const Step* step, float* hidden,
                       uint8_t* workspace, int num_threads, OrcaTimings* timings) {
  Workspace ws(*model, step->num_tokens, workspace);
  std::vector<AttentionItem> items;
  attention_items(*step, model->shape, items);
#pragma omp parallel num_threads(num_threads)
  {
    [[maybe_unused]] const AmxTiles tiles;
    std::vector<float> line(model->hidden_size);
    Stopwatch watch(timings);
    for (int64_t i = 0; i < num_layers; ++i) {
      attention_part(*model, layers[i], *step, items, hidden, hidden, true, ws, line.data(), watch);
      mlp_part(*model, layers[i], step->num_tokens, hidden, hidden, true, ws, line.data(), watch);
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
    [[maybe_unused]] const AmxTiles tiles;
    std::vector<float> line(model->hidden_size);
    Stopwatch watch(nullptr);
    attention_part(*model, *layer, *step, items, hidden, out, false, ws, line.data(), watch);
  }
}

void orca_llama_mlp(const OrcaLlama* model, const OrcaLlamaLayer* layer, int64_t num_tokens, const float* hidden, float* out,
                    uint8_t* workspace, int num_threads) {
  Workspace ws(*model, num_tokens, workspace);
#pragma omp parallel num_threads(num_threads)
  {
    [[maybe_unused]] const AmxTiles tiles;
    std::vector<float> line(model->hidden_size);
    Stopwatch watch(nullptr);
    mlp_part(*model, *layer, num_tokens, hidden, out, false, ws, line.data(), watch);
  }
}

// y [num_rows, n] = x [num_rows, k] times the weights; norm_weight null: x as it is. Rows go through `workspace`, of
// orca_linear_workspace_bytes.
void orca_linear(const Packed* w, const float* x, int64_t num_rows, const float* norm_weight, double eps, float* y, uint8_t* workspace,
                 int num_threads) {
  const Rows rows = Workspace::take_rows(workspace, num_rows, w->k);
#pragma omp parallel num_threads(num_threads)
  {
    [[maybe_unused]] const AmxTiles tiles;
    std::vector<float> line(w->k);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_rows; ++t) {
      if (norm_weight) norm_row(x + t * w->k, w->k, {norm_weight, eps}, line.data());
      quantize_row(norm_weight ? line.data() : x + t * w->k, w->k, rows, t);
    }
    linear_in_team(*w, rows, num_rows, {y, w->n});
  }
}

int64_t orca_linear_workspace_bytes(int64_t num_rows, int64_t k) {
  uint8_t* end = nullptr;
  Workspace::take_rows(end, num_rows, k);
  return reinterpret_cast<int64_t>(end);
}
}
