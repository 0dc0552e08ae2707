#!/usr/bin/env bash
# Makes the files of this folder with ffmpeg 5.1: bash make.sh
set -euo pipefail
cd "$(dirname "$0")"

# make NAME SECONDS RATE CHANNELS FORMAT..: a tone of 440 Hz (0.3) and one of 3000 Hz (0.2). In stereo, the left channel has the
# first at twice the amplitude, the right one the second, so that their mean is the same.
make() {
  local name=$1 seconds=$2 rate=$3 channels=$4
  shift 4
  local a='0.3*sin(2*PI*440*t)' b='0.2*sin(2*PI*3000*t)' tones
  if [ "$channels" = 1 ]; then tones="$a+$b"; else tones="2*$a|2*$b"; fi
  ffmpeg -v error -y -f lavfi -i "aevalsrc=$tones:s=$rate:d=$seconds" -map_metadata -1 -fflags +bitexact -flags:a +bitexact "$@" "$name"
}

make 8k-mono-u8.wav 0.25 8000 1 -c:a pcm_u8
make 16k-mono-i16.wav 0.25 16000 1 -c:a pcm_s16le
make 11k-mono-f32.wav 0.25 11025 1 -c:a pcm_f32le
make 24k-stereo-i24.wav 0.25 24000 2 -c:a pcm_s24le
make 16k-mono.mp3 0.5 16000 1 -c:a libmp3lame -b:a 32k
make 44k-stereo.mp3 0.5 44100 2 -c:a libmp3lame -b:a 128k
make 48k-mono.flac 0.25 48000 1 -c:a flac -sample_fmt s16
make 24k-stereo.flac 0.25 24000 2 -c:a flac -sample_fmt s16
make 44k-stereo.ogg 0.5 44100 2 -c:a libvorbis -q:a 4 -page_duration 100000
make 16k-mono.ogg 0.1 16000 1 -c:a libvorbis -q:a 0
make 44k-mono.m4a 0.5 44100 1 -c:a aac -b:a 64k
make 48k-stereo.m4a 0.25 48000 2 -c:a alac -sample_fmt s16p
make 48k-mono.opus.ogg 0.25 48000 1 -c:a libopus -b:a 32k
# A picture that moves, without sound.
ffmpeg -v error -y -f lavfi -i "color=black:s=16x16:d=0.1" -fflags +bitexact -flags:v +bitexact -c:v mpeg4 no-audio.mp4
# From 200 to 6200 Hz in the left channel, a quieter tone in the right one.
ffmpeg -v error -y -f lavfi -i "aevalsrc=0.5*sin(2*PI*(200*t+6000*t*t))|0.1*sin(2*PI*1500*t):s=24000:d=0.5" -map_metadata -1 \
  -fflags +bitexact -flags:a +bitexact -c:a flac -sample_fmt s16 chirp-24k-stereo.flac
