// The likeliest experts of each token, in descending order, and their weights. One workgroup per token. The
// place of an expert is the number of experts that are better. With order.wgsl.

alias elem = f32;

struct Info {
    // [rows, tokens, experts]
    strides: vec3<u32>,
    tokens: u32,
    vectors: u32,
    experts: u32,
    chosen: u32,
    // 1: weights are normalized to a sum of 1.
    normalised: u32,
}

@group(0) @binding(0) var<storage, read_write> logits: array<elem>;
@group(0) @binding(1) var<storage, read_write> chosen: array<i32>;
@group(0) @binding(2) var<storage, read_write> weights: array<f32>;
@group(0) @binding(3) var<uniform> info: Info;

const LANES = 256u;
const MOST = 1024u;

var<workgroup> keys: array<u32, MOST>;
var<workgroup> powers: array<f32, MOST>;
var<workgroup> chosen_powers: array<f32, MOST>;
// Bounds of loops are read from here: a loop whose bound is a uniform is slow on software devices.
var<workgroup> shared_experts: u32;

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let vector = group.x + group.y * groups.x;
    if vector >= info.vectors {
        return;
    }
    if lane == 0u {
        shared_experts = info.experts;
    }
    let experts = workgroupUniformLoad(&shared_experts);
    let at = vector / info.tokens * info.strides.x + vector % info.tokens * info.strides.y;
    for (var e = lane; e < experts; e += LANES) {
        keys[e] = key_of(f32(logits[at + e * info.strides.z]));
    }
    workgroupBarrier();
    var largest = 0u;
    for (var e = 0u; e < experts; e++) {
        largest = max(largest, keys[e]);
    }
    for (var e = lane; e < experts; e += LANES) {
        powers[e] = exp(score_of(keys[e]) - score_of(largest));
    }
    workgroupBarrier();
    for (var e = lane; e < experts; e += LANES) {
        let own = vec2(keys[e], e);
        var place = 0u;
        for (var other = 0u; other < experts; other++) {
            place += u32(is_better(vec2(keys[other], other), own));
        }
        if place < info.chosen {
            chosen[vector * info.chosen + place] = i32(e);
            chosen_powers[place] = powers[e];
        }
    }
    workgroupBarrier();
    for (var i = lane; i < info.chosen; i += LANES) {
        var sum = 0.0;
        if info.normalised == 1u {
            for (var e = 0u; e < info.chosen; e++) {
                sum += chosen_powers[e];
            }
        } else {
            for (var e = 0u; e < experts; e++) {
                sum += powers[e];
            }
        }
        weights[vector * info.chosen + i] = chosen_powers[i] / sum;
    }
}
