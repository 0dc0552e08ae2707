// The last of three steps that choose a token for each row: the best of its tops, or a sample from the tokens
// that processors keep. One workgroup per row.
//
// A threshold is found without sorting, three bits of the keys at a time. A place among candidates is found
// by descending into one of eight parts at a time. Every sum has a fixed order. With order.wgsl.

// Candidates with their tokens in a list, or the keys of all tokens.
alias entry = vec2<u32>;
const LISTED = true;

struct Info {
    rows: u32,
    vocab: u32,
    // Number of workgroups that a row had, and tokens of each.
    shares: u32,
    share: u32,
    word_strides: vec2<u32>,
    // Number of random words per row.
    steps: u32,
    used_stride: u32,
    // Strides of rows, and within them.
    occurred_strides: vec2<u32>,
    // 1: the chosen token is marked as having occurred.
    penalized: u32,
    // 0: the likeliest token is chosen.
    draws: u32,
    // 0: all tokens.
    top_k: u32,
    // 1 - top_p; 0: all tokens.
    tail: f32,
    min_p: f32,
}

// 8 entries per share of each row: a key and its token.
@group(0) @binding(0) var<storage, read_write> tops: array<vec2<u32>>;
// [rows, 2, vocab]: candidates at the offset of their share in the first half, room for a list in the second.
// Or [rows, vocab].
@group(0) @binding(1) var<storage, read_write> entries: array<entry>;
// Per share: the number of candidates, their weight, and the weight of other tokens.
@group(0) @binding(2) var<storage, read_write> found: array<f32>;
@group(0) @binding(3) var<storage, read_write> words: array<i32>;
@group(0) @binding(4) var<storage, read_write> used: array<i32>;
@group(0) @binding(5) var<storage, read_write> occurred: array<i32>;
@group(0) @binding(6) var<storage, read_write> chosen: array<i32>;
@group(0) @binding(7) var<uniform> info: Info;

const LANES = 256u;
// Number of best tokens per share.
const TOPS = 8u;
// Number of bins of three bits, and of parts of the candidates. Each has an equal share of the lanes.
const PARTS = 8u;
const TOGETHER = LANES / PARTS;

// The quantity to add up: candidates, candidates with the lowest key that is kept, or weights.
const COUNT = 0u;
const TIES = 1u;
const WEIGHTS = 2u;

var<workgroup> best: array<vec2<u32>, LANES>;
var<workgroup> bins: array<f32, PARTS * LANES>;
var<workgroup> sums: array<f32, LANES>;

// Number of candidates in the row.
var<workgroup> listed: u32;

// Index of the first candidate.
var<private> first_entry: u32;
// The key of the largest score.
var<private> largest: u32;
// The candidates that are left: those with keys from lowest_kept on; of those with that key, candidates from
// first_kept on; of those, candidates with weights of at least `least`.
var<private> lowest_kept: u32;
var<private> first_kept: u32;
var<private> least: f32;

// One of several sums: its index, the total before it, and the sum itself.
struct Pick {
    at: u32,
    before: f32,
    sum: f32,
}

fn key_at(i: u32) -> u32 {
    return vec2(entries[first_entry + i]).x;
}

fn mass(what: u32, i: u32) -> f32 {
    let key = key_at(i);
    if what == COUNT {
        return 1.0;
    } else if what == TIES {
        return select(0.0, 1.0, key == lowest_kept);
    }
    let kept = key > lowest_kept || (key == lowest_kept && i >= first_kept);
    let own = weight(key, largest);
    return select(0.0, own, kept && own >= least);
}

// Adds up the lanes of each part. Its first lane then has the sum.
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

// The first of the sums at which the running total exceeds the limit; else the last that is not 0.
fn pick(number: u32, step: u32, before: f32, limit: f32) -> Pick {
    var picked = Pick(0u, before, 0.0);
    var all = before;
    for (var i = 0u; i < number; i++) {
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

fn total(count: u32, lane: u32) -> f32 {
    var sum = 0.0;
    for (var i = lane; i < count; i += LANES) {
        sum += mass(WEIGHTS, i);
    }
    add_up(sum, lane);
    var all = 0.0;
    for (var i = 0u; i < PARTS; i++) {
        all += sums[i * TOGETHER];
    }
    workgroupBarrier();
    return all;
}

// The smallest key at which the running total of ascending keys, starting at `before`, exceeds the limit.
fn threshold(what: u32, count: u32, before: f32, limit: f32, lane: u32) -> Pick {
    var mask = 0u;
    var place = Pick(0u, before, 0.0);
    for (var turn = 0u; turn < 11u; turn++) {
        let shift = 30u - 3u * turn;
        for (var bin = 0u; bin < PARTS; bin++) {
            bins[bin * LANES + lane] = 0.0;
        }
        for (var i = lane; i < count; i += LANES) {
            let key = key_at(i);
            if (key & mask) == place.at {
                bins[(key >> shift) % PARTS * LANES + lane] += mass(what, i);
            }
        }
        workgroupBarrier();
        var sum = 0.0;
        let bin = lane / TOGETHER * LANES + lane % TOGETHER;
        for (var i = 0u; i < LANES; i += TOGETHER) {
            sum += bins[bin + i];
        }
        add_up(sum, lane);
        let digit = pick(PARTS, TOGETHER, place.before, limit);
        place = Pick(place.at | (digit.at << shift), digit.before, digit.sum);
        mask |= 7u << shift;
        workgroupBarrier();
    }
    return place;
}

// The first of `number` candidates from `begin` to `end` at which the running total exceeds the limit.
fn find(what: u32, begin: u32, end: u32, number: u32, before: f32, limit: f32, lane: u32) -> u32 {
    var place = vec2(begin, end);
    var all = before;
    var width = number;
    while width > LANES {
        width = (width + PARTS - 1u) / PARTS;
        let first = place.x + lane / TOGETHER * width;
        var sum = 0.0;
        for (var i = first + lane % TOGETHER; i < min(first + width, place.y); i += TOGETHER) {
            sum += mass(what, i);
        }
        add_up(sum, lane);
        let part = pick(PARTS, TOGETHER, all, limit);
        place.x += part.at * width;
        place.y = min(place.x + width, place.y);
        all = part.before;
        workgroupBarrier();
    }
    var own = 0.0;
    if place.x + lane < place.y {
        own = mass(what, place.x + lane);
    }
    sums[lane] = own;
    workgroupBarrier();
    let at = place.x + pick(LANES, 1u, all, limit).at;
    workgroupBarrier();
    return at;
}

// Concatenates the candidates of all shares. Returns their number.
fn list(row: u32, lane: u32) -> u32 {
    let first_found = row * 2u * info.vocab;
    first_entry = first_found + info.vocab;
    var count = 0u;
    for (var share = 0u; share < info.shares; share++) {
        let more = u32(found[(row * info.shares + share) * 3u]);
        for (var i = lane; i < more; i += LANES) {
            entries[first_entry + count + i] = entries[first_found + share * info.share + i];
        }
        count += more;
    }
    if lane == 0u {
        listed = count;
    }
    storageBarrier();
    return workgroupUniformLoad(&listed);
}

// Samples a candidate after top_k, top_p and min_p.
fn drawn(row: u32, word: i32, lane: u32) -> u32 {
    let count = list(row, lane);
    if info.top_k > 0u && info.top_k < count {
        lowest_kept = threshold(COUNT, count, 0.0, f32(count - info.top_k), lane).at;
    }
    if info.tail > 0.0 {
        // With a top_k, tokens that are not candidates do not count. Without it, they are dropped first.
        var gone = 0.0;
        for (var share = 0u; share < info.shares && info.top_k == 0u; share++) {
            gone += found[(row * info.shares + share) * 3u + 2u];
        }
        let limit = info.tail * (gone + total(count, lane));
        let last = threshold(WEIGHTS, count, gone, limit, lane);
        lowest_kept = last.at;
        // Of candidates with that key, the first are dropped. Of those with the largest key, the last one
        // stays.
        let each = weight(last.at, largest);
        let ties = round(last.sum / each) - select(0.0, 1.0, last.at == largest);
        let go = clamp(floor((limit - last.before) / each), 0.0, max(ties, 0.0));
        let last_gone = find(TIES, 0u, count, count, 0.0, go - 0.5, lane);
        first_kept = select(0u, last_gone + 1u, go > 0.0);
    }
    least = info.min_p;
    let limit = f32(word) / 16777216.0 * total(count, lane);
    return vec2(entries[first_entry + find(WEIGHTS, 0u, count, count, 0.0, limit, lane)]).y;
}

// Samples from all tokens.
fn drawn_of_all(row: u32, word: i32, lane: u32) -> u32 {
    first_entry = row * info.vocab;
    sums[lane] = 0.0;
    if lane < info.shares {
        sums[lane] = found[(row * info.shares + lane) * 3u + 1u];
    }
    workgroupBarrier();
    var all = 0.0;
    for (var share = 0u; share < info.shares; share++) {
        all += sums[share];
    }
    let limit = f32(word) / 16777216.0 * all;
    let share = pick(info.shares, 1u, 0.0, limit);
    workgroupBarrier();
    let first = share.at * info.share;
    let end = min(first + info.share, info.vocab);
    return find(WEIGHTS, first, end, info.share, share.before, limit, lane);
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
    let step = min(u32(used[row * info.used_stride]), info.steps - 1u);
    let number = info.shares * TOPS;
    best[lane] = vec2(0u, 0u);
    if lane < number {
        best[lane] = tops[row * number + lane];
    }
    for (var left = LANES / 2u; left > 0u; left /= 2u) {
        workgroupBarrier();
        if lane < left && is_better(best[lane + left], best[lane]) {
            best[lane] = best[lane + left];
        }
    }
    workgroupBarrier();
    largest = best[0].x;
    var token = i32(best[0].y);
    if info.draws == 1u {
        let word = words[dot(vec2(row, step), info.word_strides)];
        if LISTED {
            token = i32(drawn(row, word, lane));
        } else {
            token = i32(drawn_of_all(row, word, lane));
        }
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
