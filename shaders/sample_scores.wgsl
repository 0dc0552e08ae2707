// The first of three steps that choose a token for each row of logits: applies processors in transformers'
// order, and turns scores into keys, which are integers in the same order. Several workgroups share a row,
// each with neighboring tokens. Every 32 lanes leave their best token. If top_p needs it, a workgroup counts
// its tokens by score. With order.wgsl.

alias elem = f32;

struct Info {
    rows: u32,
    vocab: u32,
    // Number of workgroups per row, and tokens of each.
    shares: u32,
    share: u32,
    // Strides of rows, and within them.
    logit_strides: vec2<u32>,
    occurred_strides: vec2<u32>,
    // 1: tokens that occurred are penalized.
    penalized: u32,
    penalty: f32,
    temperature: f32,
    // 1: keys are stored.
    draws: u32,
    // 1: tokens are counted.
    counted: u32,
}

@group(0) @binding(0) var<storage, read_write> logits: array<elem>;
@group(0) @binding(1) var<storage, read_write> occurred: array<i32>;
@group(0) @binding(2) var<storage, read_write> keys: array<u32>;
// 8 entries per share of each row: a key and its token; a key of 0 if there is none.
@group(0) @binding(3) var<storage, read_write> tops: array<vec2<u32>>;
// Per share: the number of tokens in each bin, and the bin of the best token. Tokens that are 128 or more
// bins away from it are not counted.
@group(0) @binding(4) var<storage, read_write> bins: array<u32>;
@group(0) @binding(5) var<uniform> info: Info;

const LANES = 256u;
const TOGETHER = 32u;
const BINS = 128u;

var<workgroup> best: array<vec2<u32>, LANES>;
var<workgroup> counts: array<atomic<u32>, BINS>;

// Infinity and NaN stay as they are.
fn processed(logit: f32, penalized: bool) -> f32 {
    if (bitcast<u32>(logit) & 0x7fffffffu) >= 0x7f800000u {
        return logit;
    }
    var score = logit;
    if penalized {
        score = select(score / info.penalty, score * info.penalty, score < 0.0);
    }
    if info.temperature != 1.0 {
        score /= info.temperature;
    }
    return score;
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
    let first = workgroup % info.shares * info.share;
    let end = min(first + info.share, info.vocab);

    var own = vec2(0u, 0u);
    for (var token = first + lane; token < end; token += LANES) {
        var penalized = false;
        if info.penalized == 1u {
            penalized = occurred[dot(vec2(row, token), info.occurred_strides)] != 0;
        }
        let logit = f32(logits[dot(vec2(row, token), info.logit_strides)]);
        let key = key_of(processed(logit, penalized));
        if info.draws == 1u {
            keys[row * info.vocab + token] = key;
        }
        if key > own.x {
            own = vec2(key, token);
        }
    }
    best[lane] = own;
    for (var left = TOGETHER / 2u; left > 0u; left /= 2u) {
        workgroupBarrier();
        if lane % TOGETHER < left && is_better(best[lane + left], best[lane]) {
            best[lane] = best[lane + left];
        }
    }
    if lane % TOGETHER == 0u {
        tops[(workgroup * LANES + lane) / TOGETHER] = best[lane];
    }
    if info.counted == 0u {
        return;
    }
    if lane < BINS {
        atomicStore(&counts[lane], 0u);
    }
    workgroupBarrier();
    var largest = 0u;
    for (var i = 0u; i < LANES; i += TOGETHER) {
        largest = max(largest, best[i].x);
    }
    let top = bin_of(largest);
    for (var token = first + lane; token < end; token += LANES) {
        let bin = bin_of(keys[row * info.vocab + token]);
        if top - bin < i32(BINS) {
            atomicAdd(&counts[u32(bin) % BINS], 1u);
        }
    }
    workgroupBarrier();
    if lane < BINS {
        bins[workgroup * (BINS + 1u) + lane] = atomicLoad(&counts[lane]);
    } else if lane == BINS {
        bins[workgroup * (BINS + 1u) + BINS] = bitcast<u32>(top);
    }
}
