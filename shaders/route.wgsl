// The best experts of each token, in descending order, and their weights. One workgroup per token. The
// place of an expert is the number of experts that are better. With order.wgsl.

alias elem = f32;
// Whether scores are sigmoids of logits, instead of their softmax.
const SIGMOID = false;

struct Info {
    // [rows, tokens, experts]
    strides: vec3<u32>,
    tokens: u32,
    vectors: u32,
    experts: u32,
    chosen: u32,
    // 1: weights are normalized to a sum of 1.
    normalised: u32,
    // 1: experts are chosen by scores with their biases, from the best groups.
    has_choice: u32,
    is_biased: u32,
    bias_stride: u32,
    groups: u32,
    chosen_groups: u32,
    // Number of best experts whose scores are that of a group: 1 or 2.
    best: u32,
    // Factor of all weights.
    scale: f32,
}

@group(0) @binding(0) var<storage, read_write> logits: array<elem>;
// [experts]
@group(0) @binding(1) var<storage, read_write> bias: array<f32>;
@group(0) @binding(2) var<storage, read_write> chosen: array<i32>;
@group(0) @binding(3) var<storage, read_write> weights: array<f32>;
@group(0) @binding(4) var<uniform> info: Info;

const LANES = 256u;
const MOST = 1024u;
const MOST_GROUPS = 128u;

var<workgroup> keys: array<u32, MOST>;
var<workgroup> powers: array<f32, MOST>;
var<workgroup> chosen_powers: array<f32, MOST>;
var<workgroup> of_groups: array<u32, MOST_GROUPS>;
// Bounds of loops are read from here: a loop whose bound is a uniform is slow on software devices.
var<workgroup> shared_experts: u32;
var<workgroup> shared_choice: u32;

// Replaces the keys by those of scores with their biases, and hides experts that are not in the best groups.
fn choose(experts: u32, lane: u32) {
    var whole = 1.0;
    if !SIGMOID {
        whole = 0.0;
        for (var e = 0u; e < experts; e++) {
            whole += powers[e];
        }
    }
    for (var e = lane; e < experts; e += LANES) {
        var choice = powers[e] / whole;
        if info.is_biased == 1u {
            choice += bias[e * info.bias_stride];
        }
        keys[e] = key_of(choice);
    }
    workgroupBarrier();
    let each = experts / info.groups;
    for (var group = lane; group < info.groups; group += LANES) {
        var first = LOWEST;
        var second = LOWEST;
        for (var i = 0u; i < each; i++) {
            let key = keys[group * each + i];
            second = max(second, min(first, key));
            first = max(first, key);
        }
        of_groups[group] = select(first, key_of(score_of(first) + score_of(second)), info.best == 2u);
    }
    workgroupBarrier();
    for (var e = lane; e < experts; e += LANES) {
        let own = vec2(of_groups[e / each], e / each);
        var place = 0u;
        for (var other = 0u; other < info.groups; other++) {
            place += u32(is_better(vec2(of_groups[other], other), own));
        }
        if place >= info.chosen_groups {
            keys[e] = LOWEST;
        }
    }
    workgroupBarrier();
}

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
        shared_choice = info.has_choice;
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
        if SIGMOID {
            powers[e] = 1.0 / (1.0 + exp(min(-score_of(keys[e]), 80.0)));
        } else {
            powers[e] = exp(score_of(keys[e]) - score_of(largest));
        }
    }
    workgroupBarrier();
    if workgroupUniformLoad(&shared_choice) == 1u {
        choose(experts, lane);
    }
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
            sum += 1e-20;
        } else if SIGMOID {
            sum = 1.0;
        } else {
            for (var e = 0u; e < experts; e++) {
                sum += powers[e];
            }
        }
        weights[vector * info.chosen + i] = chosen_powers[i] / sum * info.scale;
    }
}
