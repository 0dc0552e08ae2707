// attention_decode for keys and values that are all in the buffers.

@group(0) @binding(6) var<uniform> info: Info;

fn append(place: Place, part: Part, lane: u32) {}
