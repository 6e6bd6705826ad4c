// Single operations as plain C functions: for models that run on torch's matrix products, and to be tested one by one.
//
// Rows are tokens; strides are in numbers from one row to the next. Activations are float32; K and V are too, or bfloat16.
#include <omp.h>

#include "attention.h"
#include "elementwise.h"

using namespace orca;

namespace {

// For one token a team of threads costs more than it saves.
template <typename Call>
void for_each_row(int64_t num_rows, int num_threads, Call call) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows > 1)
  for (int64_t row = 0; row < num_rows; ++row) call(row);
}

template <typename Number>
void attend_all(const Attention<Number>& all, int num_threads) {
  const std::vector<AttentionItem> items = attention_items(all.step, all.shape);
#pragma omp parallel num_threads(num_threads)
  attend_in_team(all, items);
}

// The keys and values of an iteration's tokens, and where they go.
struct NewKv {
  float* k;
  const float* v;
  int64_t k_stride, v_stride;
  const int64_t* slots;
};

template <typename Number>
void write(const NewKv& from, int64_t num_tokens, const Shape& shape, const Kv<Number>& kv, int num_threads) {
  for_each_row(num_tokens, num_threads, [&](int64_t t) {
    for (int64_t head = 0; head < shape.num_kv_heads; ++head)
      store_kv(from.k + t * from.k_stride + head * shape.head_dim, from.v + t * from.v_stride + head * shape.head_dim, from.slots[t], head, shape, kv);
  });
}

template <typename Number>
void rotate_and_write(float* q, int64_t q_stride, const NewKv& from, const Angles& angles, int64_t num_tokens, const Shape& shape,
                      const Kv<Number>& kv, int num_threads) {
  const Norm none{nullptr, 0.0};
  for_each_row(num_tokens, num_threads, [&](int64_t t) {
    const int64_t turn = t * (shape.head_dim / 2);
    rotate_and_store(q + t * q_stride, from.k + t * from.k_stride, from.v + t * from.v_stride, Angles{angles.cos + turn, angles.sin + turn},
                     none, none, from.slots[t], shape, kv);
  });
}

}  // namespace

extern "C" {

// y = x / rms(x) * weight.
void orca_rms_norm(const float* x, int64_t num_rows, int64_t n, const Norm* norm, float* y, int num_threads) {
  for_each_row(num_rows, num_threads, [&](int64_t row) { norm_row(x + row * n, n, *norm, y + row * n); });
}

// update += hidden; y = update / rms(update) * weight.
void orca_add_rms_norm(float* update, const float* hidden, int64_t num_rows, int64_t n, const Norm* norm, float* y, int num_threads) {
  for_each_row(num_rows, num_threads, [&](int64_t row) {
    float* sum = update + row * n;
    for (int64_t i = 0; i < n; ++i) sum[i] += hidden[row * n + i];
    norm_row(sum, n, *norm, y + row * n);
  });
}

// gate_up [num_rows, 2 n], the gate first.
void orca_silu_mul(const float* gate_up, int64_t num_rows, int64_t n, float* y, int num_threads) {
  for_each_row(num_rows, num_threads,
               [&](int64_t row) { silu_mul_row(gate_up + row * 2 * n, gate_up + row * 2 * n + n, n, y + row * n); });
}

void orca_attention_bf16(const Step* step, const Shape* shape, const Kv<uint16_t>* kv, const float* q, int64_t q_stride, float* out, float scale,
                    int num_threads) {
  attend_all<uint16_t>({*step, *shape, *kv, q, q_stride, out, shape->num_heads * shape->head_dim, scale}, num_threads);
}

void orca_attention_f32(const Step* step, const Shape* shape, const Kv<float>* kv, const float* q, int64_t q_stride, float* out,
                        float scale, int num_threads) {
  attend_all<float>({*step, *shape, *kv, q, q_stride, out, shape->num_heads * shape->head_dim, scale}, num_threads);
}

void orca_write_kv_bf16(const NewKv* from, int64_t num_tokens, const Shape* shape, const Kv<uint16_t>* kv, int num_threads) {
  write(*from, num_tokens, *shape, *kv, num_threads);
}

void orca_write_kv_f32(const NewKv* from, int64_t num_tokens, const Shape* shape, const Kv<float>* kv, int num_threads) {
  write(*from, num_tokens, *shape, *kv, num_threads);
}

// q and k are turned in place, k and v stored. cos and sin [num_tokens, head_dim / 2].
void orca_rotate_and_write_kv_bf16(float* q, int64_t q_stride, const NewKv* from, const Angles* angles, int64_t num_tokens, const Shape* shape,
                              const Kv<uint16_t>* kv, int num_threads) {
  rotate_and_write(q, q_stride, *from, *angles, num_tokens, *shape, *kv, num_threads);
}

void orca_rotate_and_write_kv_f32(float* q, int64_t q_stride, const NewKv* from, const Angles* angles, int64_t num_tokens,
                                  const Shape* shape, const Kv<float>* kv, int num_threads) {
  rotate_and_write(q, q_stride, *from, *angles, num_tokens, *shape, *kv, num_threads);
}
}
