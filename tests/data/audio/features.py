"""Records the log-mel features of chirp-24k-stereo.flac: python features.py

Needs ffmpeg 5.1, Transformers 5.23 and torch 2.8. ffmpeg decodes, mixes and resamples.
"""

import pathlib
import subprocess

import numpy as np
from transformers import WhisperFeatureExtractor

here = pathlib.Path(__file__).parent
command = ["ffmpeg", "-v", "error", "-i", here / "chirp-24k-stereo.flac", "-af",
           "pan=mono|c0=0.5*c0+0.5*c1,aresample=16000:filter_size=256:cutoff=0.95:internal_sample_fmt=dblp",
           "-f", "f32le", "-"]
samples = np.frombuffer(subprocess.run(command, check=True, capture_output=True).stdout, np.float32)
features = WhisperFeatureExtractor(feature_size=80)(samples, sampling_rate=16000, padding="do_not_pad", return_tensors="np")
features = features.input_features[0].astype("<f4")
print(samples.shape, features.shape)
(here / "chirp-24k-stereo.mel80.f32").write_bytes(features.tobytes())
