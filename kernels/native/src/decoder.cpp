// The layers of a decoder of the Llama family over one iteration's tokens, as plain C functions.
//
// Everything but attention sees all tokens of all requests as the rows of one matrix (selective batching, ORCA 3.2).
// Activations are float32 between the products and 8-bit inside them; K and V are bfloat16. One team of threads goes
// through a call, in one of two ways. With few tokens, all threads share each operation, so that weights are read once,
// and wait for each other after it. With many, a thread takes some tokens through all operations up to the next attention:
// their activations stay in its caches, and threads seldom wait.
#include <omp.h>

#include <chrono>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "shares.h"

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

// No two of these share memory: threads that go by rows are at different operations at a time.
struct Workspace {
  float* qkv;       // [T, (heads + 2 kv_heads) * dim]
  float* attended;  // [T, heads * dim]
  Rows normed;      // of hidden size
  Rows weighed;     // attended, as products take it
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
    normed = take_rows(p, num_tokens, model.hidden_size);
    weighed = take_rows(p, num_tokens, attended_size);
    inner = take_rows(p, num_tokens, model.intermediate_size);
  }
};

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

// The operations of a layer on some of an iteration's rows, [row, end), all of whose memory is `ws` and the rows' own.
struct Layers {
  const OrcaLlama& model;
  Step step;  // for attention only
  const Workspace& ws;

  int64_t attended_size() const { return model.shape.num_heads * model.shape.head_dim; }
  int64_t qkv_size() const { return attended_size() + 2 * model.shape.num_kv_heads * model.shape.head_dim; }
  Target qkv(const OrcaLlamaLayer& layer) const { return {ws.qkv, qkv_size(), layer.qkv_bias}; }

  // Normalised hidden state, as products take it.
  void norm(const float* hidden, const Norm& norm, int64_t row, int64_t end, float* line) const {
    for (int64_t t = row; t < end; ++t) {
      norm_row(hidden + t * model.hidden_size, model.hidden_size, norm, line);
      quantize_row(line, model.hidden_size, ws.normed, t);
    }
  }

  void rotate(const OrcaLlamaLayer& layer, int64_t row, int64_t end) const {
    const int64_t dim = model.shape.head_dim;
    for (int64_t t = row; t < end; ++t) {
      const Angles angles{model.cos + step.positions[t] * (dim / 2), model.sin + step.positions[t] * (dim / 2)};
      float* q = ws.qkv + t * qkv_size();
      float* k = q + attended_size();
      const float* v = k + model.shape.num_kv_heads * dim;
      rotate_and_store(q, k, v, angles, layer.q_norm, layer.k_norm, step.slots[t], model.shape, layer.kv);
    }
  }

  Attention<uint16_t> attention(const OrcaLlamaLayer& layer) const {
    const float scale = 1.0f / std::sqrt(static_cast<float>(model.shape.head_dim));
    return {step, model.shape, layer.kv, ws.qkv, qkv_size(), ws.attended, attended_size(), scale};
  }

  // What attention gave, as products take it.
  void quantize_attended(int64_t row, int64_t end) const {
    for (int64_t t = row; t < end; ++t) quantize_row(ws.attended + t * attended_size(), attended_size(), ws.weighed, t);
  }

  // SiLU(gate) * up of normalised rows as the next product takes it: one group of 64 columns, which never leaves the caches
  // as float32. The intermediate size is a multiple of 32, so that up begins with a pair of tiles.
  void gate_up(const Packed& w, int64_t row, int64_t end, int64_t group, bool few) const {
    alignas(64) float gate[kRowBlock][kRowGroup], up[kRowBlock][kRowGroup];
    const int64_t size = model.intermediate_size, column = group * kRowGroup, columns = std::min<int64_t>(kRowGroup, size - column);
    const Target to_gate{gate[0], kRowGroup, nullptr, false, row, column}, to_up{up[0], kRowGroup, nullptr, false, row, size + column};
    for (int64_t c = 0; c < columns; c += kPair * kLanes) {
      multiply_pair(w, ws.normed, row, end, (column + c) / kLanes, few, to_gate);
      multiply_pair(w, ws.normed, row, end, (size + column + c) / kLanes, few, to_up);
    }
    for (int64_t t = row; t < end; ++t) {
      silu_mul_row(gate[t - row], up[t - row], columns, gate[t - row]);
      quantize_columns(gate[t - row], columns, ws.inner, t, group);
    }
  }
  int64_t gate_up_groups() const { return ws.inner.k / kRowGroup; }
};

// out (+)= attention of the normalised hidden state, operation by operation; called by every thread of a team.
void attention_in_team(const Layers& layers, const OrcaLlamaLayer& layer, const std::vector<AttentionItem>& items, const float* hidden,
                       float* out, bool add, float* line, Stopwatch& watch) {
  const int64_t num_tokens = layers.step.num_tokens;
#pragma omp for schedule(static)
  for (int64_t t = 0; t < num_tokens; ++t) layers.norm(hidden, layer.input_norm, t, t + 1, line);
  watch.lap(&OrcaTimings::other);
  linear_in_team(layer.qkv, layers.ws.normed, num_tokens, layers.qkv(layer));
  watch.lap(&OrcaTimings::products);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < num_tokens; ++t) layers.rotate(layer, t, t + 1);
  watch.lap(&OrcaTimings::other);
  attend_in_team(layers.attention(layer), items);
  watch.lap(&OrcaTimings::attention);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < num_tokens; ++t) layers.quantize_attended(t, t + 1);
  watch.lap(&OrcaTimings::other);
  linear_in_team(layer.o, layers.ws.weighed, num_tokens, {out, layers.model.hidden_size, nullptr, add});
  watch.lap(&OrcaTimings::products);
}

// out (+)= MLP of the normalised hidden state, operation by operation; called by every thread of a team.
void mlp_in_team(const Layers& layers, const OrcaLlamaLayer& layer, int64_t num_tokens, const float* hidden, float* out, bool add,
                 float* line, Stopwatch& watch) {
#pragma omp for schedule(static)
  for (int64_t t = 0; t < num_tokens; ++t) layers.norm(hidden, layer.post_norm, t, t + 1, line);
  watch.lap(&OrcaTimings::other);
  const int64_t groups = layers.gate_up_groups(), blocks = (num_tokens + kRowBlock - 1) / kRowBlock;
#pragma omp for schedule(dynamic, 1)
  for (int64_t item = 0; item < blocks * groups; ++item) {
    const int64_t row = item / groups * kRowBlock, end = std::min(num_tokens, row + kRowBlock);
    layers.gate_up(layer.gate_up, row, end, item % groups, are_few(num_tokens));
  }
  linear_in_team(layer.down, layers.ws.inner, num_tokens, {out, layers.model.hidden_size, nullptr, add});
  watch.lap(&OrcaTimings::products);
}

constexpr int64_t kBlock = 32;  // rows that a thread takes through a layer: few enough to share, many enough for each read of weights

// Rows [row, end) from the hidden state to K, V and what attention takes.
void rows_to_attention(const Layers& layers, const OrcaLlamaLayer& layer, int64_t row, int64_t end, float* hidden, float* line,
                       Stopwatch& watch) {
  layers.norm(hidden, layer.input_norm, row, end, line);
  watch.lap(&OrcaTimings::other);
  linear(layer.qkv, layers.ws.normed, row, end, are_few(layers.step.num_tokens), layers.qkv(layer));
  watch.lap(&OrcaTimings::products);
  layers.rotate(layer, row, end);
  watch.lap(&OrcaTimings::other);
}

// Rows [row, end) from what attention gave to the layer's output.
void rows_from_attention(const Layers& layers, const OrcaLlamaLayer& layer, int64_t row, int64_t end, float* hidden, float* line,
                         Stopwatch& watch) {
  const Target to{hidden, layers.model.hidden_size, nullptr, true};
  const bool few = are_few(layers.step.num_tokens);
  layers.quantize_attended(row, end);
  watch.lap(&OrcaTimings::other);
  linear(layer.o, layers.ws.weighed, row, end, few, to);
  watch.lap(&OrcaTimings::products);
  layers.norm(hidden, layer.post_norm, row, end, line);
  watch.lap(&OrcaTimings::other);
  for (int64_t group = 0; group < layers.gate_up_groups(); ++group) layers.gate_up(layer.gate_up, row, end, group, few);
  linear(layer.down, layers.ws.inner, row, end, few, to);
  watch.lap(&OrcaTimings::products);
}

// Whether there are rows enough for each thread to have blocks of its own.
bool by_rows(int64_t num_tokens, int num_threads) { return 2 * num_tokens >= 3 * kBlock * num_threads; }

// All layers, blocks of rows by blocks of rows. A thread attends with the rows that are its own.
void layers_by_rows(const Layers& layers, const OrcaLlamaLayer* layer, int64_t num_layers, const std::vector<AttentionItem>& items,
                    float* hidden, int num_threads, OrcaTimings* timings) {
  const int64_t num_tokens = layers.step.num_tokens, blocks = (num_tokens + kBlock - 1) / kBlock;
  const auto first_block = [&](int thread) { return blocks * thread / num_threads; };
  std::vector<int64_t> first_items;
  for (int thread = 0; thread <= num_threads; ++thread)
    first_items.push_back(std::partition_point(items.begin(), items.end(), [&](const AttentionItem& item) {
      return item.first < first_block(thread) * kBlock;
    }) - items.begin());
  Shares shares(2 * num_layers + 1, num_threads);
#pragma omp parallel num_threads(num_threads)
  {
    [[maybe_unused]] const AmxTiles tiles;
    std::vector<float> line(layers.model.hidden_size);
    AttentionScratch<uint16_t> scratch;
    Stopwatch watch(timings);
    for (int64_t i = 0; i <= num_layers; ++i) {
      shares.each(2 * i, first_block, [&](int64_t block) {
        const int64_t row = block * kBlock, end = std::min(num_tokens, row + kBlock);
        if (i > 0) rows_from_attention(layers, layer[i - 1], row, end, hidden, line.data(), watch);
        if (i < num_layers) rows_to_attention(layers, layer[i], row, end, hidden, line.data(), watch);
      });
      if (i == num_layers) break;
#pragma omp barrier
      watch.lap(&OrcaTimings::other);
      const Attention<uint16_t> attention = layers.attention(layer[i]);
      shares.each(2 * i + 1, [&](int thread) { return first_items[thread]; }, [&](int64_t item) { attend(attention, items, item, scratch); });
#pragma omp barrier
      watch.lap(&OrcaTimings::attention);
    }
  }
}

}  // namespace

extern "C" {

int64_t orca_workspace_bytes(const OrcaLlama* model, int64_t num_tokens) {
  uint8_t* end = nullptr;
  Workspace(*model, num_tokens, end);
  return reinterpret_cast<int64_t>(end);
}

// All layers: hidden [num_tokens, hidden_size] float32 becomes the last layer's output. `timings` may be null.
void orca_llama_layers(const OrcaLlama* model, const OrcaLlamaLayer* layer, int64_t num_layers, const Step* step, float* hidden,
                       uint8_t* workspace, int num_threads, OrcaTimings* timings) {
  const Workspace ws(*model, step->num_tokens, workspace);
  const Layers layers{*model, *step, ws};
  const std::vector<AttentionItem> items = attention_items(*step, model->shape);
  if (by_rows(step->num_tokens, num_threads)) {
    layers_by_rows(layers, layer, num_layers, items, hidden, num_threads, timings);
    return;
  }
#pragma omp parallel num_threads(num_threads)
  {
    [[maybe_unused]] const AmxTiles tiles;
    std::vector<float> line(model->hidden_size);
    Stopwatch watch(timings);
    for (int64_t i = 0; i < num_layers; ++i) {
      attention_in_team(layers, layer[i], items, hidden, hidden, true, line.data(), watch);
      mlp_in_team(layers, layer[i], step->num_tokens, hidden, hidden, true, line.data(), watch);
    }
  }
}

// One layer's attention, or MLP, of this rank alone: out is its part of the sum over ranks.
void orca_llama_attention(const OrcaLlama* model, const OrcaLlamaLayer* layer, const Step* step, const float* hidden, float* out,
                          uint8_t* workspace, int num_threads) {
  const Workspace ws(*model, step->num_tokens, workspace);
  const Layers layers{*model, *step, ws};
  const std::vector<AttentionItem> items = attention_items(*step, model->shape);
#pragma omp parallel num_threads(num_threads)
  {
    [[maybe_unused]] const AmxTiles tiles;
    std::vector<float> line(model->hidden_size);
    Stopwatch watch(nullptr);
    attention_in_team(layers, *layer, items, hidden, out, false, line.data(), watch);
  }
}

void orca_llama_mlp(const OrcaLlama* model, const OrcaLlamaLayer* layer, int64_t num_tokens, const float* hidden, float* out,
                    uint8_t* workspace, int num_threads) {
  const Workspace ws(*model, num_tokens, workspace);
  const Layers layers{*model, {}, ws};
#pragma omp parallel num_threads(num_threads)
  {
    [[maybe_unused]] const AmxTiles tiles;
    std::vector<float> line(model->hidden_size);
    Stopwatch watch(nullptr);
    mlp_in_team(layers, *layer, num_tokens, hidden, out, false, line.data(), watch);
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
