// What attention_decode and attention_packed share, which go with a few rows over all keys, 256 at a time.

const LANES = 256u;
const ROWS = 4u * FOURS;
// Lanes that read the vector of a key together.
const TOGETHER = 4u;
// Keys whose sums are put together between two barriers.
const STEP = 128u / FOURS;

// Numbers of the rows for each dimension, which are no more than 256, or 128 where rows are 8.
var<workgroup> rows: array<vec4<f32>, ROOM>;
// Sums of lanes; then scores, then weights of keys.
var<workgroup> memory: array<vec4<f32>, 512>;
var<workgroup> results: array<vec4<f32>, 16u * FOURS>;

// Parts begin at positions that info.chunk divides, and blocks of keys at those that LANES divides. So what a row makes of its
// keys does not depend on what the other rows of its workgroup see: keys that it does not see itself change nothing. The last
// part has all that are left.
fn part_of(place: Place, begin: i32, end: i32, columns: u32) -> Part {
    let from_position = (begin / info.chunk + i32(place.split)) * info.chunk;
    let until = select(min(from_position + info.chunk, end), end, place.split + 1u == info.splits);
    return Part(max(from_position, begin), until, info.head_dim, columns, u32(info.softcap != 0.0));
}

// Numbers of four rows, times the scale.
fn load_rows(place: Place, count: u32, lane: u32, dim: u32) {
    for (var i = lane; i < count; i += LANES) {
        let d = i / FOURS;
        var numbers = vec4(0.0);
        for (var r = 0u; r < 4u; r++) {
            let row = place.first_row + i % FOURS * 4u + r;
            if row <= place.last_row && d < dim {
                numbers[r] = f32(q[query_of(place, row) + d * info.q_strides.w]) * info.scale;
            }
        }
        rows[i] = numbers;
    }
}

// The largest of what all lanes left in memory, in the first results.
fn largest_of_lanes(lane: u32) {
    workgroupBarrier();
    if lane < 16u * FOURS {
        let i = lane / FOURS * 16u * FOURS + lane % FOURS;
        var most = memory[i];
        for (var k = 1u; k < 16u; k++) {
            most = max(most, memory[i + k * FOURS]);
        }
        results[lane] = most;
    }
    workgroupBarrier();
    if lane < FOURS {
        var most = results[lane];
        for (var k = 1u; k < 16u; k++) {
            most = max(most, results[k * FOURS + lane]);
        }
        results[lane] = most;
    }
    workgroupBarrier();
}

// Their sum.
fn sum_of_lanes(lane: u32) {
    workgroupBarrier();
    if lane < 16u * FOURS {
        let i = lane / FOURS * 16u * FOURS + lane % FOURS;
        var sum = memory[i];
        for (var k = 1u; k < 16u; k++) {
            sum += memory[i + k * FOURS];
        }
        results[lane] = sum;
    }
    workgroupBarrier();
    if lane < FOURS {
        var sum = results[lane];
        for (var k = 1u; k < 16u; k++) {
            sum += results[k * FOURS + lane];
        }
        results[lane] = sum;
    }
    workgroupBarrier();
}

// Goes on by one key a lane (https://arxiv.org/abs/1805.02867): leaves their weights in memory, and gives what everything
// so far has to be multiplied by. Hidden keys have the lowest score.
fn weigh(
    scores: ptr<function, array<vec4<f32>, FOURS>>,
    largest: ptr<function, array<vec4<f32>, FOURS>>,
    sums: ptr<function, array<vec4<f32>, FOURS>>,
    lane: u32,
) -> array<vec4<f32>, FOURS> {
    var shrunk: array<vec4<f32>, FOURS>;
    for (var j = 0u; j < FOURS; j++) {
        memory[lane * FOURS + j] = (*scores)[j];
    }
    largest_of_lanes(lane);
    for (var j = 0u; j < FOURS; j++) {
        let most = max((*largest)[j], results[j]);
        let weight = select(exp((*scores)[j] - most), vec4(0.0), (*scores)[j] == vec4(LOWEST));
        shrunk[j] = exp((*largest)[j] - most);
        (*largest)[j] = most;
        (*sums)[j] = (*sums)[j] * shrunk[j] + weight;
        memory[lane * FOURS + j] = weight;
    }
    workgroupBarrier();
    return shrunk;
}
