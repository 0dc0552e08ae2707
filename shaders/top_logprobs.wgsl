// The likeliest tokens of each row of logits, with their log-probabilities. One workgroup per row.
//
// Logits become keys, which are integers in the same order. Each lane has every 256th token. In each turn,
// the lanes compare their best remaining tokens, and the lane with the best of all looks for its next one.
// With order.wgsl.

alias elem = f32;

struct Info {
    rows: u32,
    vocab: u32,
    // Number of tokens to return per row.
    most: u32,
    // Strides of rows, and within them.
    strides: vec2<u32>,
}

@group(0) @binding(0) var<storage, read_write> logits: array<elem>;
@group(0) @binding(1) var<storage, read_write> tokens: array<i32>;
@group(0) @binding(2) var<storage, read_write> log_probs: array<f32>;
@group(0) @binding(3) var<uniform> info: Info;

const LANES = 256u;

// Keys with their tokens, the best first.
var<workgroup> tops: array<vec2<u32>, LANES>;
var<workgroup> sums: array<f32, LANES>;

// The best token of a lane that is worse than `last`; a key of 0 if there is none.
fn next(row: u32, lane: u32, last: vec2<u32>) -> vec2<u32> {
    var best = vec2(0u, info.vocab);
    for (var token = lane; token < info.vocab; token += LANES) {
        let one = vec2(key_of(f32(logits[dot(vec2(row, token), info.strides)])), token);
        if is_better(last, one) && is_better(one, best) {
            best = one;
        }
    }
    return best;
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    if row >= info.rows {
        return;
    }
    var own = vec2(0u, info.vocab);
    for (var token = lane; token < info.vocab; token += LANES) {
        let one = vec2(key_of(f32(logits[dot(vec2(row, token), info.strides)])), token);
        if is_better(one, own) {
            own = one;
        }
    }
    var largest = 0u;
    var log_sum = 0.0;
    for (var i = 0u; i < info.most; i++) {
        tops[lane] = own;
        for (var left = LANES / 2u; left > 0u; left /= 2u) {
            workgroupBarrier();
            if lane < left && is_better(tops[lane + left], tops[lane]) {
                tops[lane] = tops[lane + left];
            }
        }
        workgroupBarrier();
        let best = tops[0];
        if i == 0u {
            largest = best.x;
            let logit = score_of(largest);
            var sum = 0.0;
            for (var token = lane; token < info.vocab; token += LANES) {
                sum += exp(f32(logits[dot(vec2(row, token), info.strides)]) - logit);
            }
            sums[lane] = sum;
            for (var left = LANES / 2u; left > 0u; left /= 2u) {
                workgroupBarrier();
                if lane < left {
                    sums[lane] += sums[lane + left];
                }
            }
            workgroupBarrier();
            log_sum = log(sums[0]);
        }
        if lane == 0u {
            let is_one = largest > LOWEST && largest < HIGHEST;
            tokens[row * info.most + i] = select(-1, i32(best.y), is_one);
            log_probs[row * info.most + i] = score_of(best.x) - score_of(largest) - log_sum;
        }
        if best.y % LANES == lane {
            own = next(row, lane, best);
        }
        workgroupBarrier();
    }
}
