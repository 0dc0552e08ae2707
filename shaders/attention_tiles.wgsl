// y = softmax(scale * q k) v for many queries, on units that multiply small matrices (cooperative matrices).
// The queries of heads that share keys are rows. A workgroup takes 64 of them over the keys that they see, 16
// keys at a time (https://arxiv.org/abs/2307.08691). A subgroup has 16 rows: their queries and the sums of
// their results stay in its registers. Scores, and the weights computed from them, pass through workgroup
// memory. With attention.wgsl, attention_dense.wgsl and attention_many.wgsl.

enable wgpu_cooperative_matrix;
alias elem = f32;
// Type of the output: the result, or the input of attention_combine.
alias mixed = elem;
const SPLIT = false;
// Elements per vector: a multiple of 16.
const DIM = 128u;
// The matrices that are multiplied. All are squares here.
alias x_matrix = coop_mat16x16<elem, A>;
alias w_matrix = coop_mat16x16<elem, B>;
alias y_matrix = coop_mat16x16<f32, C>;
const HEIGHT = 16u;
const SIZE = 16u;
const LANES = 128u;
// What memory consists of, and how many of them four numbers are.
alias cell = vec4<elem>;
const CELLS = 1u;
fn cell_of(four: vec4<elem>, i: u32) -> cell { return four; }

// Queries, keys and values are read as vec4s, two at once.
alias pack = vec4<elem>;
const WIDTH = 4u;
const_assert HEIGHT == SIZE;
const KEYS = 16u;
// Number of rows per subgroup.
const PART = 16u;
const PARTS = ROWS / PART;
// Number of matrices per 16 elements, and per vector.
const PIECES = 16u / SIZE;
const ALONG = DIM / SIZE;
// Cells from one key to the next, with padding to avoid bank conflicts.
const STRIDE = (DIM + 8u) / 4u * CELLS;
// Elements from the scores of one row to those of the next, with the same padding.
const SCORES = KEYS + 4u;
// Cells from the weights of one row to those of the next.
const WEIGHTS = KEYS / 4u * CELLS;
// Cells from one matrix to the next along a vector.
const NEXT = SIZE / 4u * CELLS;
// Number of groups of eight elements in 16 vectors, and how many of them a lane reads.
const EIGHTS = 16u * DIM / 8u;
const EACH_READS = (EIGHTS + LANES - 1u) / LANES;
// Number of half rows per lane, with the scores of 8 keys each.
const EACH = 2u * ROWS / LANES;
// Scores are exponents of 2, and so are these constants: a weight is 2^(score - bar). FIRST is the largest
// weight of a row when its bar is set. No weight exceeds MOST: a larger one sets a new bar. Weights therefore
// fit float16, and those down to 2^-21 of the largest are normal numbers.
const FIRST = 7.0;
const MOST = 14.0;
// Less than every score, and more than LOWEST, the score of hidden keys.
const NO_BAR = -1e30;
const LOG2_E = 1.4426950408889634;

var<workgroup> key_tile: array<cell, KEYS * STRIDE>;
var<workgroup> value_tile: array<cell, KEYS * STRIDE>;
// Scores first, then sums that are rescaled or written as the result.
var<workgroup> scores: array<f32, ROWS * SCORES>;
var<workgroup> weights: array<cell, ROWS * WEIGHTS>;
// x is 1: a row has a new bar.
var<workgroup> raised: vec4<u32>;

// Matrix units read at multiples of 16 bytes, and drivers put one variable after the other. The sizes of all
// variables are therefore such multiples.
struct Aligned {
    part: Part,
    rest: array<u32, 3>,
}
var<workgroup> shared_part: Aligned;

// Eight elements of a vector.
struct Eight {
    low: vec4<elem>,
    high: vec4<elem>,
}

fn key_eight(at: u32, c: u32) -> Eight {
    let i = at / 4u + 2u * c;
    return Eight(vec4<elem>(keys[i]), vec4<elem>(keys[i + 1u]));
}

fn value_eight(at: u32, c: u32) -> Eight {
    let i = at / 4u + 2u * c;
    return Eight(vec4<elem>(values[i]), vec4<elem>(values[i + 1u]));
}

fn put_key(key: u32, c: u32, eight: Eight) {
    let at = key * STRIDE + 2u * c * CELLS;
    for (var i = 0u; i < CELLS; i++) {
        key_tile[at + i] = cell_of(eight.low, i);
        key_tile[at + CELLS + i] = cell_of(eight.high, i);
    }
}

fn put_value(key: u32, c: u32, eight: Eight) {
    let at = key * STRIDE + 2u * c * CELLS;
    for (var i = 0u; i < CELLS; i++) {
        value_tile[at + i] = cell_of(eight.low, i);
        value_tile[at + CELLS + i] = cell_of(eight.high, i);
    }
}

fn put_weights(row: u32, c: u32, four: vec4<elem>) {
    for (var i = 0u; i < CELLS; i++) {
        weights[row * WEIGHTS + c * CELLS + i] = cell_of(four, i);
    }
}

// Replaces the scores of hidden keys by LOWEST.
fn seen(scores: vec4<f32>, position: vec4<i32>, begin: i32, end: i32) -> vec4<f32> {
    return select(vec4(LOWEST), scores, (vec4(begin) <= position) & (position <= vec4(end)));
}

// Four scores of a row.
fn scores_at(row: u32, c: u32) -> vec4<f32> {
    let at = row * SCORES + 4u * c;
    return vec4(scores[at], scores[at + 1u], scores[at + 2u], scores[at + 3u]);
}

fn put_scores(row: u32, c: u32, four: vec4<f32>) {
    let at = row * SCORES + 4u * c;
    for (var i = 0u; i < 4u; i++) {
        scores[at + i] = four[i];
    }
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
) {
    let workgroup = group.x + group.y * groups.x;
    if workgroup >= info.workgroups {
        return;
    }
    let place = place_of(workgroup);
    let earliest = earliest_of(place);
    if lane == 0u {
        shared_part.part = share(place, earliest);
        raised.x = 0u;
    }
    let part = workgroupUniformLoad(&shared_part).part;
    if SPLIT {
        if part.begin >= part.end {
            for (var row = lane; row < ROWS; row += LANES) {
                write_nothing(place, row, DIM);
            }
            return;
        }
    }
    // The slot of the part's first key, and the number of keys after it. Keys past the last one are replaced
    // by the last one, for which no row has a weight.
    let slot = u32(part.begin + i32(info.slots - info.origin)) % info.slots;
    let last = u32(max(part.end - 1 - part.begin, 0));
    let key_vectors = keys_of(place);
    let value_vectors = values_of(place);

    // The first and the last key that all rows see.
    let first_query = positions[place.batch] + i32(place.first_row / info.group);
    let last_query = positions[place.batch] + i32(place.last_row / info.group);
    let whole_from = max(earliest, last_query - info.window + 1);
    let whole_to = min(first_query, part.end - 1);
    let scale = info.scale * select(LOG2_E, 1.0, part.capped == 1u);

    // A driver may choose the size of subgroups. If there are fewer subgroups than parts, each computes
    // several parts in turn.
    for (var first_part = 0u; first_part < PARTS; first_part += subgroups) {
        // If there are more subgroups than parts, the extra ones repeat the last part.
        let own = min(first_part + subgroup, PARTS - 1u);
        let own_scores = own * PART * SCORES;
        let own_weights = own * PART * WEIGHTS;

        // Queries pass through the memory of the weights, 16 elements of each at a time.
        var queries: array<x_matrix, PIECES * ALONG>;
        for (var piece = 0u; piece < DIM / 16u; piece++) {
            // All lanes have read the previous contents.
            workgroupBarrier();
            for (var i = 0u; i < EACH; i++) {
                let row = (lane + i * LANES) / 2u;
                let c = (lane + i * LANES) % 2u * 2u;
                let at = query_of(place, min(place.first_row + row, place.last_row)) / 4u + 4u * piece + c;
                put_weights(row, c, vec4<elem>(q[at]));
                put_weights(row, c + 1u, vec4<elem>(q[at + 1u]));
            }
            workgroupBarrier();
            for (var i = 0u; i < PIECES * PIECES; i++) {
                let at = i / PIECES * SIZE * WEIGHTS + i % PIECES * NEXT;
                queries[i / PIECES * ALONG + piece * PIECES + i % PIECES] = coopLoadT<x_matrix>(&weights[own_weights + at], WEIGHTS);
            }
        }
        workgroupBarrier();
        for (var i = lane; i < ROWS * SCORES; i += LANES) {
            scores[i] = 0.0;
        }
        workgroupBarrier();
        let zero = coopLoadT<y_matrix>(&scores[own_scores], SCORES);
        var results: array<y_matrix, PIECES * ALONG>;
        for (var i = 0u; i < PIECES * ALONG; i++) {
            results[i] = zero;
        }

        // Per half row: the first and the last visible position, the bar that scores are compared with, and
        // the sum of weights.
        var begins: array<i32, EACH>;
        var ends: array<i32, EACH>;
        var bars: array<f32, EACH>;
        var sums: array<f32, EACH>;
        var shrunk: array<f32, EACH>;
        for (var i = 0u; i < EACH; i++) {
            let query = positions[place.batch] + i32((place.first_row + (lane + i * LANES) / 2u) / info.group);
            begins[i] = max(earliest, query - info.window + 1);
            ends[i] = min(query, part.end - 1);
            bars[i] = NO_BAR;
            sums[i] = 0.0;
        }

        // Keys are loaded one block ahead of values.
        var next_keys: array<Eight, EACH_READS>;
        var next_values: array<Eight, EACH_READS>;
        for (var i = 0u; i < EACH_READS; i++) {
            let e = min(lane + i * LANES, EIGHTS - 1u);
            let key = e / (DIM / 8u);
            let c = e % (DIM / 8u);
            let now = turn(slot + min(key, last));
            let then = turn(slot + min(key + KEYS, last));
            put_key(key, c, key_eight(key_vectors + now * info.key_strides.z, c));
            next_keys[i] = key_eight(key_vectors + then * info.key_strides.z, c);
            next_values[i] = value_eight(value_vectors + now * info.value_strides.z, c);
        }
        workgroupBarrier();

        for (var base = part.begin; base < part.end; base += i32(KEYS)) {
            for (var across = 0u; across < PIECES; across++) {
                var products: array<y_matrix, PIECES>;
                for (var down = 0u; down < PIECES; down++) {
                    products[down] = zero;
                }
                for (var i = 0u; i < ALONG; i++) {
                    // The columns of the transposed keys.
                    let some = coopLoad<w_matrix>(&key_tile[across * SIZE * STRIDE + i * NEXT], STRIDE);
                    for (var down = 0u; down < PIECES; down++) {
                        products[down] = coopMultiplyAdd(queries[down * ALONG + i], some, products[down]);
                    }
                }
                for (var down = 0u; down < PIECES; down++) {
                    coopStoreT(products[down], &scores[own_scores + down * SIZE * SCORES + across * SIZE], SCORES);
                }
            }
            workgroupBarrier();

            for (var i = 0u; i < EACH_READS; i++) {
                let e = lane + i * LANES;
                if e < EIGHTS {
                    put_key(e / (DIM / 8u), e % (DIM / 8u), next_keys[i]);
                    put_value(e / (DIM / 8u), e % (DIM / 8u), next_values[i]);
                }
            }
            for (var i = 0u; i < EACH; i++) {
                let row = (lane + i * LANES) / 2u;
                let half = (lane + i * LANES) % 2u;
                var fours = mat4x4(
                    scores_at(row, 0u) * scale,
                    scores_at(row, 1u) * scale,
                    scores_at(row, 2u) * scale,
                    scores_at(row, 3u) * scale,
                );
                if part.capped == 1u {
                    fours = LOG2_E * mat4x4(cap(fours[0]), cap(fours[1]), cap(fours[2]), cap(fours[3]));
                }
                // All rows see most blocks whole.
                if base < whole_from || base + i32(KEYS) - 1 > whole_to {
                    let position = vec4(base) + vec4(0, 1, 2, 3);
                    fours = mat4x4(
                        seen(fours[0], position, begins[i], ends[i]),
                        seen(fours[1], position + 4, begins[i], ends[i]),
                        seen(fours[2], position + 8, begins[i], ends[i]),
                        seen(fours[3], position + 12, begins[i], ends[i]),
                    );
                }
                let of_four = max(max(fours[0], fours[1]), max(fours[2], fours[3]));
                let most = max(max(of_four.x, of_four.y), max(of_four.z, of_four.w));
                shrunk[i] = 1.0;
                if most > bars[i] + MOST {
                    // Without a bar, sums are 0.
                    if bars[i] > NO_BAR {
                        raised.x = 1u;
                    }
                    shrunk[i] = exp2(bars[i] - (most - FIRST));
                    bars[i] = most - FIRST;
                }
                let low_weights = exp2(select(fours[0], fours[2], half == 1u) - bars[i]);
                let high_weights = exp2(select(fours[1], fours[3], half == 1u) - bars[i]);
                sums[i] = sums[i] * shrunk[i] + dot(low_weights + high_weights, vec4(1.0));
                put_weights(row, 2u * half, vec4<elem>(low_weights));
                put_weights(row, 2u * half + 1u, vec4<elem>(high_weights));
            }

            // All lanes have written.
            if workgroupUniformLoad(&raised).x == 1u {
                for (var piece = 0u; piece < DIM / 16u; piece++) {
                    for (var i = 0u; i < PIECES * PIECES; i++) {
                        let at = i / PIECES * SIZE * SCORES + i % PIECES * SIZE;
                        coopStoreT(results[i / PIECES * ALONG + piece * PIECES + i % PIECES], &scores[own_scores + at], SCORES);
                    }
                    workgroupBarrier();
                    for (var i = 0u; i < EACH; i++) {
                        let row = (lane + i * LANES) / 2u;
                        let c = (lane + i * LANES) % 2u * 2u;
                        put_scores(row, c, scores_at(row, c) * shrunk[i]);
                        put_scores(row, c + 1u, scores_at(row, c + 1u) * shrunk[i]);
                    }
                    workgroupBarrier();
                    for (var i = 0u; i < PIECES * PIECES; i++) {
                        let at = i / PIECES * SIZE * SCORES + i % PIECES * SIZE;
                        results[i / PIECES * ALONG + piece * PIECES + i % PIECES] = coopLoadT<y_matrix>(&scores[own_scores + at], SCORES);
                    }
                    workgroupBarrier();
                }
                if lane == 0u {
                    raised.x = 0u;
                }
            }

            for (var i = 0u; i < EACH_READS; i++) {
                let e = min(lane + i * LANES, EIGHTS - 1u);
                let key = e / (DIM / 8u);
                let c = e % (DIM / 8u);
                let now = turn(slot + min(u32(base - part.begin) + key + KEYS, last));
                let then = turn(slot + min(u32(base - part.begin) + key + 2u * KEYS, last));
                next_values[i] = value_eight(value_vectors + now * info.value_strides.z, c);
                next_keys[i] = key_eight(key_vectors + then * info.key_strides.z, c);
            }
            for (var k = 0u; k < PIECES; k++) {
                var those: array<x_matrix, PIECES>;
                for (var down = 0u; down < PIECES; down++) {
                    those[down] = coopLoadT<x_matrix>(&weights[own_weights + down * SIZE * WEIGHTS + k * NEXT], WEIGHTS);
                }
                for (var i = 0u; i < ALONG; i++) {
                    let some = coopLoadT<w_matrix>(&value_tile[k * SIZE * STRIDE + i * NEXT], STRIDE);
                    for (var down = 0u; down < PIECES; down++) {
                        results[down * ALONG + i] = coopMultiplyAdd(those[down], some, results[down * ALONG + i]);
                    }
                }
            }
        }

        // Both halves of a row, in the padding after its scores.
        workgroupBarrier();
        for (var i = 0u; i < EACH; i++) {
            scores[(lane + i * LANES) / 2u * SCORES + KEYS + (lane + i * LANES) % 2u] = sums[i];
        }
        for (var piece = 0u; piece < DIM / 16u; piece++) {
            for (var i = 0u; i < PIECES * PIECES; i++) {
                let at = i / PIECES * SIZE * SCORES + i % PIECES * SIZE;
                coopStoreT(results[i / PIECES * ALONG + piece * PIECES + i % PIECES], &scores[own_scores + at], SCORES);
            }
            workgroupBarrier();
            for (var i = 0u; i < EACH; i++) {
                let row = (lane + i * LANES) / 2u;
                let c = (lane + i * LANES) % 2u * 2u;
                if row / PART - first_part < subgroups && place.first_row + row <= place.last_row {
                    let sum = scores[row * SCORES + KEYS] + scores[row * SCORES + KEYS + 1u];
                    write(place, place.first_row + row, scores_at(row, c), bars[i] / LOG2_E, sum, 4u * piece + c, DIM);
                    write(place, place.first_row + row, scores_at(row, c + 1u), bars[i] / LOG2_E, sum, 4u * piece + c + 1u, DIM);
                }
            }
            workgroupBarrier();
        }
    }
}
