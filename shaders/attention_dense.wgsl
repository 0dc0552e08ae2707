// Reading of keys and values and writing of results, which attention_decode, attention_prefill and
// attention_tiles share.

// The offsets of elements 4 c to 4 c + 3 of a vector. Past its end, they point at any of its elements.
fn places(c: u32, stride: u32) -> vec4<u32> {
    return min(vec4(4u * c) + vec4(0u, 1u, 2u, 3u), vec4(info.head_dim - 1u)) * stride;
}

// Sets elements past the end of the vector to 0.
fn ended(numbers: vec4<f32>, c: u32) -> vec4<f32> {
    return select(vec4(0.0), numbers, vec4(4u * c) + vec4(0u, 1u, 2u, 3u) < vec4(info.head_dim));
}

fn key_at(at: u32, c: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(keys[at / 4u + c]));
    }
    let i = places(c, info.key_strides.w) + at;
    return ended(vec4<f32>(vec4(vec4(keys[i.x]).x, vec4(keys[i.y]).x, vec4(keys[i.z]).x, vec4(keys[i.w]).x)), c);
}

fn value_at(at: u32, c: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(values[at / 4u + c]));
    }
    let i = places(c, info.value_strides.w) + at;
    return ended(vec4<f32>(vec4(vec4(values[i.x]).x, vec4(values[i.y]).x, vec4(values[i.z]).x, vec4(values[i.w]).x)), c);
}

// The offset of the vectors of a row's slots for one KV head.
fn keys_of(place: Place) -> u32 {
    return dot(vec3(place.batch, place.kv_head, base_of(place)), info.key_strides.xyz);
}

fn values_of(place: Place) -> u32 {
    return dot(vec3(place.batch, place.kv_head, base_of(place)), info.value_strides.xyz);
}

// The first slot of a row.
fn base_of(place: Place) -> u32 {
    return u32(positions[2u * info.batch + place.batch]);
}

// The first position that any row of the workgroup may see. Slots hold no more positions than there are, and
// padding is hidden.
fn earliest_of(place: Place) -> i32 {
    let visible_from = max(positions[info.batch + place.batch], bound[0] * i32(info.bounded));
    let last = min(positions[place.batch] + i32(info.queries), info.end);
    return max(max(info.start, visible_from), last - i32(info.slots));
}

fn share(place: Place, earliest: i32) -> Part {
    let begin = max(earliest, positions[place.batch] + i32(place.first_row / info.group) - info.window + 1);
    let end = min(positions[place.batch] + i32(place.last_row / info.group) + 1, info.end);
    return part_of(place, begin, end, (info.head_dim + 3u) / 4u);
}

// Writes four elements of a row's result, or of a part of it.
fn write(place: Place, row: u32, vector: vec4<f32>, largest: f32, sum: f32, column: u32, dim: u32) {
    let number = vector_of(place, row);
    if SPLIT {
        let at = (number * info.parts + info.before + place.split) * (dim + 2u);
        for (var i = 0u; i < 4u && 4u * column + i < dim; i++) {
            y[at + 4u * column + i] = mixed(vector[i]);
        }
        if column == 0u {
            y[at + dim] = mixed(largest);
            y[at + dim + 1u] = mixed(sum);
        }
        return;
    }
    // The result of a row that sees no keys is 0. For a single part, attention_combine gives the same bits.
    let scale = select(1.0 / sum, 0.0, sum == 0.0);
    for (var i = 0u; i < 4u && 4u * column + i < dim; i++) {
        y[number * dim + 4u * column + i] = mixed(vector[i] * scale);
    }
}

// Writes the result of a part without visible keys: a weight of 0.
fn write_nothing(place: Place, lane: u32, dim: u32) {
    if lane <= place.last_row - place.first_row {
        let part = vector_of(place, place.first_row + lane) * info.parts + info.before + place.split;
        y[part * (dim + 2u) + dim + 1u] = mixed(0.0);
    }
}
