// Sorts pairs of a token and one of its slots by the expert that they are routed to: order [tiles, tile]
// holds the pairs of each expert in tiles of their own, and -1 in unused places. One workgroup. The order of
// an expert's pairs is unspecified, since each pair is computed on its own.

struct Info {
    pairs: u32,
    experts: u32,
    tile: u32,
    tiles: u32,
}

// [rows, tokens, slots]
@group(0) @binding(0) var<storage, read_write> experts: array<i32>;
@group(0) @binding(1) var<storage, read_write> order: array<i32>;
@group(0) @binding(2) var<uniform> info: Info;

const LANES = 256u;
const MOST = 1024u;

// Number of pairs per expert, then the place of the expert's next pair.
var<workgroup> counts: array<atomic<u32>, MOST>;
// The place of the first pair of each expert.
var<workgroup> starts: array<u32, MOST>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    for (var e = lane; e < info.experts; e += LANES) {
        atomicStore(&counts[e], 0u);
    }
    workgroupBarrier();
    for (var pair = lane; pair < info.pairs; pair += LANES) {
        atomicAdd(&counts[u32(experts[pair])], 1u);
    }
    workgroupBarrier();
    // The number of places of the experts before this one, in whole tiles.
    var before = 0u;
    var next = 0u;
    for (var e = 0u; e < info.experts; e++) {
        let count = atomicLoad(&counts[e]);
        next = before + (count + info.tile - 1u) / info.tile * info.tile;
        if e % LANES == lane {
            starts[e] = before;
            for (var i = before + count; i < next; i++) {
                order[i] = -1;
            }
        }
        before = next;
    }
    for (var i = before + lane; i < info.tiles * info.tile; i += LANES) {
        order[i] = -1;
    }
    // All lanes have read the counts.
    workgroupBarrier();
    for (var e = lane; e < info.experts; e += LANES) {
        atomicStore(&counts[e], starts[e]);
    }
    workgroupBarrier();
    for (var pair = lane; pair < info.pairs; pair += LANES) {
        order[atomicAdd(&counts[u32(experts[pair])], 1u)] = i32(pair);
    }
}
