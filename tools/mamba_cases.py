"""Records what Transformers does on tiny Mamba models of other sizes than those of the other recordings.

    python tools/mamba_cases.py tests/fixtures/transformers-5.23.0-mamba        (Python with torch and transformers 5.23.0, on the CPU)

`kiln conformance` runs the folder. Models: `mamba_other` (biases in and out, none of the convolution, three inputs of it, untied
embeddings) and `falcon_mamba`.
"""

import sys

from recorder import VOCAB, Recorder, ids, left_padded
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM

recorder = Recorder(sys.argv[1])
record = recorder.generate

sizes = dict(vocab_size=VOCAB, residual_in_fp32=True, pad_token_id=0)
other = MambaConfig(
    **sizes, hidden_size=40, state_size=20, num_hidden_layers=3, conv_kernel=3, expand=3, use_bias=True,
    use_conv_bias=False, tie_word_embeddings=False,
)
falcon = FalconMambaConfig(
    **sizes, hidden_size=24, state_size=6, num_hidden_layers=2, conv_kernel=4, expand=2, time_step_rank=4,
    mixer_rms_eps=1e-3, tie_word_embeddings=False,
)
for name, cls, config, seed in (
    ("mamba_other", MambaForCausalLM, other, 71),
    ("falcon_mamba", FalconMambaForCausalLM, falcon, 81),
):
    made = recorder.model(cls, config, name, seed, fixed=lambda key: "A_log" in key)
    record(made, name, "greedy", ids(9, 6))
    record(made, name, "greedy_short", ids(2, 6))
    record(made, name, "greedy_long", ids(40, 7), new=8)
    record(made, name, "greedy_b2", ids(7, 8, 2), new=8)
    record(made, name, "greedy_nocache", ids(9, 6), use_cache=False)
    record(made, name, "beam3", ids(6, 9), new=8, num_beams=3)
    if not config.use_bias:
        # With a bias in front of the convolution, Transformers lets padding change the tokens behind it.
        record(made, name, "leftpad_b2", *left_padded(), new=8)

recorder.write()
