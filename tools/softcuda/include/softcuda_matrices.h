// The instructions of PTX for matrices of 16-bit numbers: `ldmatrix` and `mma.sync` with sums in float32. Lane 4 g + t has the numbers 2 t and 2 t + 1 of row g
// of a matrix of 8 x 8, or of its column g.
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"

// An address in the memory of the block, as 32 bits.
#define __cvta_generic_to_shared(pointer) unsigned(reinterpret_cast<const char*>(pointer) - softcuda::block.shared)

namespace softcuda {
/// Loads 1, 2 or 4 matrices. Lane 8 i + r has the address of row r of matrix i.
template <int matrices, bool transposed> void load_matrices(int site, unsigned* to, unsigned address) {
    unsigned own = self->lane / 4, two = self->lane % 4 * 2;
    for (unsigned i = 0; i < matrices; i++) {
        unsigned short numbers[2];
        for (unsigned j = 0; j < 2; j++) {
            unsigned row = transposed ? two + j : own, column = transposed ? own : two + j;
            memcpy(&numbers[j], block.shared + shuffle(site, address, 8 * i + row) + 2 * column, 2);
        }
        memcpy(&to[i], numbers, sizeof numbers);
    }
    // No lane goes on, and writes there, before all have read.
    active(site);
}
/// Multiplies 16 x k numbers with k x 8, and adds c.
template <class T, int k> void multiply_matrices(int site, float* to, const unsigned (&a)[k / 4], const unsigned (&b)[k / 8], const float (&c)[4]) {
    struct Two { unsigned x, y; };
    unsigned row = self->lane / 4, column = self->lane % 4 * 2;
    T rows[2][k], columns[2][k];
    for (unsigned t = 0; t < 4; t++)
        for (unsigned part = 0; part < k / 8; part++) {
            unsigned at = part * 8 + t * 2;
            Two of_rows = shuffle(site, Two{a[part * 2], a[part * 2 + 1]}, row * 4 + t);
            memcpy(&rows[0][at], &of_rows.x, 4), memcpy(&rows[1][at], &of_rows.y, 4);
            for (unsigned i = 0; i < 2; i++) {
                unsigned of_column = shuffle(site, b[part], (column + i) * 4 + t);
                memcpy(&columns[i][at], &of_column, 4);
            }
        }
    for (unsigned i = 0; i < 4; i++) {
        float sum = c[i];
        for (unsigned j = 0; j < k; j++) sum += float(rows[i / 2][j]) * float(columns[i % 2][j]);
        to[i] = sum;
    }
}
}  // namespace softcuda
