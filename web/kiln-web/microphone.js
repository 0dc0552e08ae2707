// Recordings of the microphone, for transcription.

/** Samples a second of the files, as speech models take them. */
const RATE = 16_000;

/** Records the microphone, from now until `stop()`, which resolves to a WAV file. */
export async function record() {
    if (!navigator.mediaDevices) throw failed("browsers allow it only on https and localhost");
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true }).catch((error) => {
        throw failed(error.name === "NotAllowedError" ? "the visitor does not allow it" : error.message);
    });
    const release = () => stream.getTracks().forEach((track) => track.stop());
    const pieces = [];
    let recorder;
    try {
        recorder = new MediaRecorder(stream);
        recorder.addEventListener("dataavailable", ({ data }) => pieces.push(data));
        recorder.start();
    } catch (error) {
        release();
        throw failed(error.message);
    }
    const ended = new Promise((resolve) => recorder.addEventListener("stop", resolve, { once: true }));
    const begin = performance.now();
    return {
        /** The length so far. */
        get seconds() {
            return (performance.now() - begin) / 1000;
        },
        async stop() {
            if (recorder.state !== "inactive") recorder.stop();
            await ended;
            release();
            // Browsers record in different formats, and each reads its own.
            const bytes = await new Blob(pieces).arrayBuffer();
            const heard = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(bytes).catch(() => {
                throw failed("nothing was recorded");
            });
            return new File([wavHeader(heard.length), shorts(mean(heard))], "microphone.wav", { type: "audio/wav" });
        },
    };
}

const failed = (why) => Object.assign(new Error(`the microphone cannot be used: ${why}`), { name: "MicrophoneError" });

/** The mean of all channels. */
function mean(heard) {
    const channels = Array.from({ length: heard.numberOfChannels }, (_, at) => heard.getChannelData(at));
    return channels[0].map((_, at) => channels.reduce((sum, channel) => sum + channel[at], 0) / channels.length);
}

const shorts = (samples) => Int16Array.from(samples, (sample) => Math.max(-1, Math.min(1, sample)) * 0x7fff);

/** The header of a WAV file with one channel of 16 bits. */
function wavHeader(samples) {
    const view = new DataView(new ArrayBuffer(44));
    const text = (at, text) => [...text].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
    const [short, long] = [view.setUint16, view.setUint32].map((set) => (at, number) => set.call(view, at, number, true));
    text(0, "RIFF");
    long(4, 36 + 2 * samples);
    text(8, "WAVEfmt ");
    long(16, 16); // bytes of this part
    short(20, 1); // whole numbers
    short(22, 1); // channels
    long(24, RATE);
    long(28, 2 * RATE); // bytes a second
    short(32, 2); // bytes of a sample
    short(34, 16); // bits
    text(36, "data");
    long(40, 2 * samples);
    return view.buffer;
}
