// A step of beam search. Finds the best continuations of each group of beams, the beams that continue, and
// the rows that they continue. One workgroup per prompt. Groups are processed in order, because a group
// avoids the tokens of the groups before it.
//
// In each turn, every lane offers its best continuation after the last one that was chosen, and the lanes
// compare them. With order.wgsl.

alias elem = f32;

struct Info {
    prompts: u32,
    // Number of beams per prompt, and per group.
    beams: u32,
    of_group: u32,
    // Number of tokens per beam.
    most: u32,
    // Number of candidates per group.
    candidates: u32,
    // Number of tokens that end a sequence.
    ends: u32,
    // Penalty of a token for each beam of an earlier group that chose it.
    penalty: f32,
    // Token that is fed to beams that do not continue.
    padding: i32,
}

@group(0) @binding(0) var<storage, read_write> tokens: array<i32>;
@group(0) @binding(1) var<storage, read_write> log_probs: array<f32>;
@group(0) @binding(2) var<storage, read_write> sums: array<f32>;
@group(0) @binding(3) var<storage, read_write> ends: array<i32>;
@group(0) @binding(4) var<storage, read_write> done: array<i32>;
@group(0) @binding(5) var<storage, read_write> candidates: array<f32>;
@group(0) @binding(6) var<storage, read_write> next: array<i32>;
@group(0) @binding(7) var<storage, read_write> parents: array<i32>;
@group(0) @binding(8) var<uniform> info: Info;

const LANES = 256u;
const MOST_BEAMS = 64u;

// A continuation: the key of its sum, its beam, its token, and the index of its token in the list of its
// beam.
const BEFORE_ALL = vec4(NONE, 0u, 0u, 0u);
const BEHIND_ALL = vec4(0u, 0xffffffffu, 0xffffffffu, 0u);

var<workgroup> tops: array<vec4<u32>, LANES>;
// Tokens of the beams so far.
var<workgroup> chosen: array<i32, MOST_BEAMS>;
var<workgroup> chosen_sums: array<f32, MOST_BEAMS>;
var<workgroup> shared_is_open: u32;

fn comes_before(one: vec4<u32>, other: vec4<u32>) -> bool {
    if one.x != other.x {
        return one.x > other.x;
    }
    return one.y < other.y || (one.y == other.y && one.z < other.z);
}

// The log-probability of a token of a beam in a group that begins at beam `begin`.
fn score_at(at: u32, begin: u32) -> f32 {
    var score = log_probs[at];
    for (var i = 0u; i < begin; i++) {
        if chosen[i] == tokens[at] {
            score -= info.penalty;
        }
    }
    return score;
}

fn is_end(token: i32) -> bool {
    for (var i = 0u; i < info.ends; i++) {
        if ends[i] == token {
            return true;
        }
    }
    return false;
}

// Whether a group continues: it is not done, and the scores of all its beams are distributions.
fn is_open(group: u32, first_row: u32) -> u32 {
    if done[group] != 0 {
        return 0u;
    }
    for (var beam = 0u; beam < info.of_group; beam++) {
        if tokens[(first_row + beam) * info.most] < 0 {
            return 0u;
        }
    }
    return 1u;
}

fn go_on(beam: u32, first: u32, parent: u32, token: i32, sum: f32) {
    next[first + beam] = token;
    parents[first + beam] = i32(parent);
    chosen[beam] = token;
    chosen_sums[beam] = sum;
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let prompt = group_id.x + group_id.y * groups.x;
    if prompt >= info.prompts {
        return;
    }
    let first = prompt * info.beams;
    for (var begin = 0u; begin < info.beams; begin += info.of_group) {
        let group = (first + begin) / info.of_group;
        let out = group * info.candidates * 4u;
        if lane == 0u {
            shared_is_open = is_open(group, first + begin);
        }
        if workgroupUniformLoad(&shared_is_open) == 0u {
            for (var i = lane; i < info.candidates * 4u; i += LANES) {
                candidates[out + i] = select(0.0, -1.0, i % 4u == 1u);
            }
            if lane < info.of_group {
                let beam = begin + lane;
                go_on(beam, first, beam, info.padding, sums[first + beam]);
            }
            workgroupBarrier();
            continue;
        }
        var last = BEFORE_ALL;
        var kept = 0u;
        for (var i = 0u; i < info.candidates; i++) {
            var own = BEHIND_ALL;
            for (var at = lane; at < info.of_group * info.most; at += LANES) {
                let beam = at / info.most;
                let place = (first + begin) * info.most + at;
                let sum = score_at(place, begin) + sums[first + begin + beam];
                let one = vec4(key_of(sum), beam, u32(tokens[place]), place);
                if comes_before(last, one) && comes_before(one, own) {
                    own = one;
                }
            }
            tops[lane] = own;
            for (var left = LANES / 2u; left > 0u; left /= 2u) {
                workgroupBarrier();
                if lane < left && comes_before(tops[lane + left], tops[lane]) {
                    tops[lane] = tops[lane + left];
                }
            }
            workgroupBarrier();
            last = tops[0];
            if lane == 0u {
                let parent = begin + last.y;
                let score = score_at(last.w, begin);
                let sum = score + sums[first + parent];
                let to = out + i * 4u;
                candidates[to] = f32(parent);
                candidates[to + 1u] = f32(last.z);
                candidates[to + 2u] = score;
                candidates[to + 3u] = sum;
                if kept < info.of_group && !is_end(i32(last.z)) {
                    go_on(begin + kept, first, parent, i32(last.z), sum);
                    kept++;
                }
            }
            workgroupBarrier();
        }
        if lane == 0u {
            // If too few beams continue, the best of those that end take their places.
            for (var i = 0u; i < info.candidates && kept < info.of_group; i++) {
                let place = out + i * 4u;
                let token = i32(candidates[place + 1u]);
                if is_end(token) {
                    go_on(begin + kept, first, u32(candidates[place]), token, candidates[place + 3u]);
                    kept++;
                }
            }
        }
        workgroupBarrier();
    }
    if lane < info.beams {
        sums[first + lane] = chosen_sums[lane];
    }
}
