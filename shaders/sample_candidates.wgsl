// The second of three steps that choose a token for each row, after sample_scores.wgsl and before
// sample.wgsl: lists the candidates, the tokens that top_k, top_p and min_p may keep. All other tokens are
// certainly removed, and the last step does not read them. The vocabulary is divided into shares of
// neighboring tokens, one per workgroup; each lists its candidates in the order of the vocabulary. The launch
// appends order.wgsl, which has keys (integers in the order of scores), bins and weights.

// Whether candidates are listed. If not, only the total weight of each share is computed, and the last step
// reads the keys of all tokens.
const LISTED = true;

struct Info {
    rows: u32,
    vocab: u32,
    // Number of shares of the vocabulary, and tokens per share; the last may have fewer.
    shares: u32,
    share: u32,
    // At least the best top_k tokens, and all with the same score as the last of them, are candidates; 0: all
    // tokens. At most the number of tops of a row, shares * TOPS.
    top_k: u32,
    // Minimum weight, exp(score - largest score), of candidates.
    least: f32,
    // Maximum fraction of the total weight that all removed tokens together have; 0: no limit.
    tail: f32,
}

// [rows, vocab]
@group(0) @binding(0) var<storage, read_write> keys: array<u32>;
// [rows, shares, TOPS]: tops, each the key and the token of the best among the tokens of 32 lanes; a key of 0
// if there is none.
@group(0) @binding(1) var<storage, read_write> tops: array<vec2<u32>>;
// [rows, shares, BINS + 1]: the number of tokens in each bin of scores, then the bin of the best token.
@group(0) @binding(2) var<storage, read_write> bins: array<u32>;
// [rows, 2, vocab]: keys with their tokens. The candidates of a share are in the first half, from the number
// of the share's first token on. The second half is room for the last step.
@group(0) @binding(3) var<storage, read_write> candidates: array<vec2<u32>>;
// [rows, shares, 3]: the number of candidates, their weight, and the weight of other tokens.
@group(0) @binding(4) var<storage, read_write> found: array<f32>;
@group(0) @binding(5) var<uniform> info: Info;

const LANES = 256u;
const TOPS = 8u;
const BINS = 128u;

// Keys of the row's tops.
var<workgroup> best: array<vec4<u32>, LANES / 4u>;
// Key of the top of rank top_k: the smallest key of a candidate. 0: all tokens are candidates.
var<workgroup> cut: u32;
var<workgroup> counts: array<u32, LANES>;
var<workgroup> sums: array<vec2<f32>, LANES>;

// The largest multiple of a bin's width, as a key, below which all tokens together certainly weigh at most
// the fraction tail of the total. 0 if the bins do not show that any token can be removed.
fn lowest_of_bins(row: u32, largest: u32, lane: u32) -> u32 {
    let top = bin_of(largest);
    let score = score_of(largest);
    if lane < BINS {
        let bin = top - i32(lane);
        var count = 0u;
        for (var share = row * info.shares; share < (row + 1u) * info.shares; share++) {
            let below = bitcast<i32>(bins[share * (BINS + 1u) + BINS]) - bin;
            if below >= 0 && below < i32(BINS) {
                count += bins[share * (BINS + 1u) + u32(bin) % BINS];
            }
        }
        // Lower and upper bounds of the bin's weight.
        let begin = f32(bin) / 4.0 - score;
        counts[lane] = count;
        sums[lane] = f32(count) * vec2(exp(begin), min(exp(begin + 0.25), 1.0));
    }
    workgroupBarrier();
    var counted = 0u;
    var least = 0.0;
    for (var i = 0u; i < BINS; i++) {
        counted += counts[i];
        least += sums[i].x;
    }
    // The factor allows for rounding of sums and exponentials.
    let limit = 0.99 * info.tail * least;
    var gone = f32(info.vocab - counted) * exp(f32(top - i32(BINS - 1u)) / 4.0 - score);
    var left = BINS;
    if gone <= limit {
        for (; left > 1u; left--) {
            gone += sums[left - 1u].y;
            if gone > limit {
                break;
            }
        }
    }
    workgroupBarrier();
    let known = left < BINS && abs(score) < LARGEST_BINNED;
    return select(0u, key_of(f32(top - i32(left - 1u)) / 4.0), known);
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let workgroup = group.x + group.y * groups.x;
    if workgroup >= info.rows * info.shares {
        return;
    }
    let row = workgroup / info.shares;
    let all = info.shares * TOPS;

    // The rank of a top is its place among the row's tops, from 1. At least as many tokens of the row are as
    // good, so the k best tokens are not below the top of rank k.
    if lane < all / 4u {
        let top = row * all + 4u * lane;
        best[lane] = vec4(tops[top].x, tops[top + 1u].x, tops[top + 2u].x, tops[top + 3u].x);
    }
    if lane == 0u {
        cut = 0u;
    }
    workgroupBarrier();
    let own = best[lane / 4u][lane % 4u];
    var largest = 0u;
    var rank = 1u;
    for (var i = 0u; i < all / 4u; i++) {
        let others = best[i];
        largest = max(max(max(largest, others.x), max(others.y, others.z)), others.w);
        let first = vec4(4u * i) + vec4(0u, 1u, 2u, 3u) < vec4(lane);
        rank += dot(vec4(1u), select(vec4(0u), vec4(1u), (others > vec4(own)) | ((others == vec4(own)) & first)));
    }
    if lane < all && rank == info.top_k {
        cut = own;
    }
    workgroupBarrier();
    var lowest = cut;
    if info.tail > 0.0 {
        lowest = lowest_of_bins(row, largest, lane);
    }

    // Each lane has neighboring tokens.
    let first = workgroup % info.shares * info.share;
    let end = min(first + info.share, info.vocab);
    let each = (info.share + LANES - 1u) / LANES;
    let from_token = min(first + lane * each, end);
    let to_token = min(from_token + each, end);
    var count = 0u;
    var weights = vec2(0.0);
    for (var token = from_token; token < to_token; token++) {
        let key = keys[row * info.vocab + token];
        let mass = weight(key, largest);
        let is_candidate = key >= lowest && mass >= info.least;
        count += select(0u, 1u, is_candidate);
        weights += select(vec2(0.0, mass), vec2(mass, 0.0), is_candidate);
    }
    counts[lane] = count;
    sums[lane] = weights;
    for (var left = LANES / 2u; left > 0u; left /= 2u) {
        workgroupBarrier();
        if lane < left {
            sums[lane] += sums[lane + left];
        }
    }
    for (var step = 1u; step < LANES; step *= 2u) {
        workgroupBarrier();
        var before = 0u;
        if lane >= step {
            before = counts[lane - step];
        }
        workgroupBarrier();
        counts[lane] += before;
    }
    if LISTED {
        var place = row * 2u * info.vocab + first + counts[lane] - count;
        for (var token = from_token; token < to_token; token++) {
            let key = keys[row * info.vocab + token];
            if key >= lowest && weight(key, largest) >= info.least {
                candidates[place] = vec2(key, token);
                place++;
            }
        }
    }
    if lane == LANES - 1u {
        found[workgroup * 3u] = f32(counts[lane]);
        found[workgroup * 3u + 1u] = sums[0].x;
        found[workgroup * 3u + 2u] = sums[0].y;
    }
}
