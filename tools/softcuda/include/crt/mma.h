// Matrices of a warp. Each lane has some numbers of a sum, which lie in a row, and of the factors what it needs for them.
#pragma once
#include "../cuda_bf16.h"
#include "../cuda_fp16.h"

namespace nvcuda::wmma {
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int m, int n, int k, class T, class Layout = void> struct fragment;
template <int m, int n, int k, class T, class Layout> struct fragment<matrix_a, m, n, k, T, Layout> {
    float x[k];
};
template <int m, int n, int k, class T, class Layout> struct fragment<matrix_b, m, n, k, T, Layout> {
    float x[k][m * n / 32];
};
template <int m, int n, int k, class T> struct fragment<accumulator, m, n, k, T> {
    static constexpr int num_elements = m * n / 32;
    T x[num_elements];
    static int row() { return int(softcuda::self->lane) * num_elements / n; }
    static int column() { return int(softcuda::self->lane) * num_elements % n; }
};

// On a GPU, addresses are multiples of 32 bytes, and rows of 16.
template <class T> void check_place(const T* at, unsigned stride) {
    if (size_t(at) % 32 == 0 && stride * sizeof(T) % 16 == 0) return;
    fprintf(stderr, "softcuda: a matrix must begin at a multiple of 32 bytes, and its rows be multiples of 16 bytes apart\n");
    abort();
}
template <int m, int n, int k, class T, class Layout> void load_matrix_sync(fragment<matrix_a, m, n, k, T, Layout>& to, const T* from, unsigned stride) {
    check_place(from, stride);
    int row = fragment<accumulator, m, n, k, float>::row();
    for (int i = 0; i < k; i++) to.x[i] = float(from[std::is_same_v<Layout, row_major> ? row * stride + i : i * stride + row]);
}
template <int m, int n, int k, class T, class Layout> void load_matrix_sync(fragment<matrix_b, m, n, k, T, Layout>& to, const T* from, unsigned stride) {
    check_place(from, stride);
    int first = fragment<accumulator, m, n, k, float>::column();
    for (int i = 0; i < k; i++)
        for (int j = 0; j < m * n / 32; j++) to.x[i][j] = float(from[std::is_same_v<Layout, row_major> ? i * stride + first + j : (first + j) * stride + i]);
}
template <int m, int n, int k, class T> size_t place(const fragment<accumulator, m, n, k, T>& of, int i, unsigned stride, layout_t layout) {
    return layout == mem_row_major ? of.row() * stride + of.column() + i : (of.column() + i) * stride + of.row();
}
template <int m, int n, int k, class T> void load_matrix_sync(fragment<accumulator, m, n, k, T>& to, const T* from, unsigned stride, layout_t layout) {
    check_place(from, stride);
    for (int i = 0; i < to.num_elements; i++) to.x[i] = from[place(to, i, stride, layout)];
}
template <int m, int n, int k, class T> void store_matrix_sync(T* to, const fragment<accumulator, m, n, k, T>& from, unsigned stride, layout_t layout) {
    check_place(to, stride);
    for (int i = 0; i < from.num_elements; i++) to[place(from, i, stride, layout)] = from.x[i];
}
template <int m, int n, int k, class T> void fill_fragment(fragment<accumulator, m, n, k, T>& to, T value) {
    for (T& x : to.x) x = value;
}
// Products and sums are float32.
template <int m, int n, int k, class T, class Rows, class Columns, class Sum>
void mma_sync(fragment<accumulator, m, n, k, Sum>& to, const fragment<matrix_a, m, n, k, T, Rows>& a, const fragment<matrix_b, m, n, k, T, Columns>& b,
              const fragment<accumulator, m, n, k, Sum>& c) {
    for (int j = 0; j < to.num_elements; j++) {
        float sum = float(c.x[j]);
        for (int i = 0; i < k; i++) sum += a.x[i] * b.x[i][j];
        to.x[j] = Sum(sum);
    }
}
}  // namespace nvcuda::wmma
