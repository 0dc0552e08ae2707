// A thread of the processor. It computes together with the worker that holds a model, in the same memory.

import { help, initSync } from "./module-threads/kiln_web.js";
import { tellPanics } from "./panics.js";

tellPanics();

self.onmessage = ({ data: { module, memory } }) => {
    initSync({ module, memory });
    help(() => self.postMessage({ joined: true }));
};
