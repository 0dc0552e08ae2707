// attention_decode for one query of each row, whose key and value are written into the buffers first.

@group(0) @binding(6) var<storage, read_write> new_keys: array<pack>;
@group(0) @binding(7) var<storage, read_write> new_values: array<pack>;
@group(0) @binding(8) var<uniform> info: Info;

// Writes the key and the value of the newest token, if this part has them. No other workgroup reads them.
fn append(place: Place, part: Part, lane: u32) {
    let position = positions[place.batch];
    if part.begin <= position && position < part.end {
        let slot = (u32(position) + info.slots - info.origin) % info.slots;
        let key = (keys_of(place) + slot * info.key_strides.z) / WIDTH;
        let value = (values_of(place) + slot * info.value_strides.z) / WIDTH;
        let token = vec2(place.batch, place.kv_head);
        let new_key = dot(token, info.new_key_strides.xy) / WIDTH;
        let new_value = dot(token, info.new_value_strides.xy) / WIDTH;
        for (var c = lane; c < part.head_dim / WIDTH; c += LANES) {
            keys[key + c * info.key_strides.w] = new_keys[new_key + c * info.new_key_strides.w];
            values[value + c * info.value_strides.w] = new_values[new_value + c * info.new_value_strides.w];
        }
    }
    storageBarrier();
}
