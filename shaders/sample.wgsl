// A token of each row of logits: processors in transformers' order, then the draw. One workgroup a row.
//
// Scores become keys, integers in the same order. A threshold is found without sorting, three bits of the keys at a
// time; a place in the vocabulary by going into one of eight parts at a time. Every sum is made in a fixed order.
// With order.wgsl.

alias elem = f32;

struct Info {
    rows: u32,
    vocab: u32,
    // Words of a row.
    steps: u32,
    // 0: all.
    top_k: u32,
    // Of rows, and within them.
    logit_strides: vec2<u32>,
    word_strides: vec2<u32>,
    occurred_strides: vec2<u32>,
    used_stride: u32,
    // 1: tokens that occurred are penalized.
    penalized: u32,
    penalty: f32,
    temperature: f32,
    // 1 - top_p; 0: all.
    tail: f32,
    min_p: f32,
    // 0: the likeliest token.
    draws: u32,
}

@group(0) @binding(0) var<storage, read_write> logits: array<elem>;
@group(0) @binding(1) var<storage, read_write> words: array<i32>;
@group(0) @binding(2) var<storage, read_write> used: array<i32>;
@group(0) @binding(3) var<storage, read_write> occurred: array<i32>;
@group(0) @binding(4) var<storage, read_write> keys: array<u32>;
@group(0) @binding(5) var<storage, read_write> chosen: array<i32>;
@group(0) @binding(6) var<uniform> info: Info;

const LANES = 256u;
// Bins of three bits, and parts of the vocabulary; each has some of the lanes.
const PARTS = 8u;
const TOGETHER = LANES / PARTS;

// What is added up: tokens, those whose key is the lowest that is kept, weights.
const COUNT = 0u;
const TIES = 1u;
const WEIGHTS = 2u;

var<workgroup> tops: array<vec2<u32>, LANES>;
var<workgroup> bins: array<f32, PARTS * LANES>;
var<workgroup> sums: array<f32, LANES>;

// The row's keys.
var<private> first_key: u32;
// The key of the largest score.
var<private> largest: u32;
// What is left: keys from this one on; of those that equal it, tokens from this one on; weights from this one on.
var<private> lowest_kept: u32;
var<private> first_kept: u32;
var<private> least: f32;

// One of several sums: its number, what is before it, and the sum itself.
struct Pick {
    at: u32,
    before: f32,
    sum: f32,
}

// What is infinite, or not a number, stays so.
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

// The largest score weighs 1.
fn weight(key: u32) -> f32 {
    let quotient = exp(score_of(key) - score_of(largest));
    return select(select(quotient, 1.0, key == largest), 0.0, key <= LOWEST);
}

fn mass(what: u32, token: u32) -> f32 {
    let key = keys[first_key + token];
    if what == COUNT {
        return 1.0;
    } else if what == TIES {
        return select(0.0, 1.0, key == lowest_kept);
    }
    let kept = key > lowest_kept || (key == lowest_kept && token >= first_kept);
    let own = weight(key);
    return select(0.0, own, kept && own >= least);
}

// Adds up each part's lanes: its sum is then at its first.
fn add_up(sum: f32, lane: u32) {
    sums[lane] = sum;
    for (var left = TOGETHER / 2u; left > 0u; left /= 2u) {
        workgroupBarrier();
        if lane % TOGETHER < left {
            sums[lane] += sums[lane + left];
        }
    }
    workgroupBarrier();
}

// The first of the sums with which all up to it exceed the limit; else the last that is not 0.
fn pick(count: u32, step: u32, before: f32, limit: f32) -> Pick {
    var picked = Pick(0u, before, 0.0);
    var all = before;
    for (var i = 0u; i < count; i++) {
        let sum = sums[i * step];
        if sum > 0.0 {
            picked = Pick(i, all, sum);
            all += sum;
            if all > limit {
                break;
            }
        }
    }
    return picked;
}

fn total(what: u32, lane: u32) -> f32 {
    var sum = 0.0;
    for (var token = lane; token < info.vocab; token += LANES) {
        sum += mass(what, token);
    }
    add_up(sum, lane);
    var all = 0.0;
    for (var i = 0u; i < PARTS; i++) {
        all += sums[i * TOGETHER];
    }
    workgroupBarrier();
    return all;
}

// The smallest key such that it and all below exceed the limit.
fn threshold(what: u32, limit: f32, lane: u32) -> Pick {
    var mask = 0u;
    var found = Pick(0u, 0.0, 0.0);
    for (var turn = 0u; turn < 11u; turn++) {
        let shift = 30u - 3u * turn;
        for (var bin = 0u; bin < PARTS; bin++) {
            bins[bin * LANES + lane] = 0.0;
        }
        for (var token = lane; token < info.vocab; token += LANES) {
            let key = keys[first_key + token];
            if (key & mask) == found.at {
                bins[(key >> shift) % PARTS * LANES + lane] += mass(what, token);
            }
        }
        workgroupBarrier();
        var sum = 0.0;
        let bin = lane / TOGETHER * LANES + lane % TOGETHER;
        for (var i = 0u; i < LANES; i += TOGETHER) {
            sum += bins[bin + i];
        }
        add_up(sum, lane);
        let digit = pick(PARTS, TOGETHER, found.before, limit);
        found = Pick(found.at | (digit.at << shift), digit.before, digit.sum);
        mask |= 7u << shift;
        workgroupBarrier();
    }
    return found;
}

// The first token such that it and all before it exceed the limit.
fn find(what: u32, limit: f32, lane: u32) -> u32 {
    var begin = 0u;
    var end = info.vocab;
    var before = 0.0;
    var width = info.vocab;
    while width > LANES {
        width = (width + PARTS - 1u) / PARTS;
        let first = begin + lane / TOGETHER * width;
        var sum = 0.0;
        for (var token = first + lane % TOGETHER; token < min(first + width, end); token += TOGETHER) {
            sum += mass(what, token);
        }
        add_up(sum, lane);
        let part = pick(PARTS, TOGETHER, before, limit);
        begin += part.at * width;
        end = min(begin + width, end);
        before = part.before;
        workgroupBarrier();
    }
    var own = 0.0;
    if begin + lane < end {
        own = mass(what, begin + lane);
    }
    sums[lane] = own;
    workgroupBarrier();
    let token = begin + pick(LANES, 1u, before, limit).at;
    workgroupBarrier();
    return token;
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
    first_key = row * info.vocab;
    let step = min(u32(used[row * info.used_stride]), info.steps - 1u);

    var top = vec2(0u, 0u);
    for (var token = lane; token < info.vocab; token += LANES) {
        var penalized = false;
        if info.penalized == 1u {
            penalized = occurred[dot(vec2(row, token), info.occurred_strides)] != 0;
        }
        let logit = f32(logits[dot(vec2(row, token), info.logit_strides)]);
        let key = key_of(processed(logit, penalized));
        if info.draws == 1u {
            keys[first_key + token] = key;
        }
        if key > top.x {
            top = vec2(key, token);
        }
    }
    tops[lane] = top;
    for (var left = LANES / 2u; left > 0u; left /= 2u) {
        workgroupBarrier();
        if lane < left {
            let other = tops[lane + left];
            if other.x > tops[lane].x || (other.x == tops[lane].x && other.y < tops[lane].y) {
                tops[lane] = other;
            }
        }
    }
    // Other lanes' keys are read from here on.
    storageBarrier();
    workgroupBarrier();
    largest = tops[0].x;
    var token = i32(tops[0].y);

    if info.draws == 1u {
        lowest_kept = 0u;
        first_kept = 0u;
        least = 0.0;
        if info.top_k > 0u && info.top_k < info.vocab {
            lowest_kept = threshold(COUNT, f32(info.vocab - info.top_k), lane).at;
        }
        if info.tail > 0.0 {
            let limit = info.tail * total(WEIGHTS, lane);
            let last = threshold(WEIGHTS, limit, lane);
            lowest_kept = last.at;
            // Of those that equal it, the first go; of the largest, not the last.
            let each = weight(last.at);
            let ties = round(last.sum / each) - select(0.0, 1.0, last.at == largest);
            let go = clamp(floor((limit - last.before) / each), 0.0, max(ties, 0.0));
            let last_gone = find(TIES, go - 0.5, lane);
            first_kept = select(0u, last_gone + 1u, go > 0.0);
        }
        least = info.min_p;
        let word = words[dot(vec2(row, step), info.word_strides)];
        let limit = f32(word) / 16777216.0 * total(WEIGHTS, lane);
        token = i32(find(WEIGHTS, limit, lane));
    }
    token = select(-1, token, largest > LOWEST && largest < HIGHEST);
    if lane == 0u {
        chosen[row] = token;
        used[row * info.used_stride] = i32(step) + 1;
        if info.penalized == 1u && token >= 0 {
            occurred[dot(vec2(row, u32(token)), info.occurred_strides)] = 1;
        }
    }
}
