#!/usr/bin/env python3
"""Make the ONNX folder that tools/bench_web.mjs gives transformers.js: codes of 4 bits, a scale for each 32.

    python -m venv DIR; DIR/bin/pip install optimum-onnx==0.1.0 onnxruntime onnx-ir torch
    DIR/bin/python tools/onnx_q4.py MODEL_FOLDER OUT_FOLDER

The export is that of optimum, and the codes are those of onnxruntime's MatMulNBits, as in the folders that transformers.js
is published with. A head that is also the embedding stays in float32, as there.
"""
import pathlib
import shutil
import sys
import tempfile


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from optimum.exporters.onnx import main_export

    model, out = map(pathlib.Path, sys.argv[1:])
    (out / "onnx").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        main_export(str(model), folder, task="text-generation-with-past")
        quantizer = MatMulNBitsQuantizer(onnx.load(f"{folder}/model.onnx"), block_size=32, is_symmetric=True)
        quantizer.process()
        onnx.save(quantizer.model.model, out / "onnx" / "model_q4.onnx")
    for file in model.glob("*.json"):
        shutil.copy(file, out)


main()
