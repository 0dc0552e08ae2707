// Whether Chrome takes shaders: Dawn, its WebGPU, with the WGSL compiler Tint, on a device that does nothing, under the limits that every device has.
//
//     node tint.mjs FILE.wgsl ..    needs the package `webgpu`; exit code 1 where a shader is refused
import { readFileSync } from 'node:fs';
import { create } from 'webgpu';

const gpu = create(['backend=null']); // It has to outlive what comes from it.
const adapter = await gpu.requestAdapter();
const wanted = ['shader-f16', 'subgroups'].filter((feature) => adapter.features.has(feature));
const device = await adapter.requestDevice({ requiredFeatures: wanted });
const files = process.argv.slice(2);
let refused = 0;
for (const file of files) {
  device.pushErrorScope('validation');
  const module = device.createShaderModule({ code: readFileSync(file, 'utf8') });
  const { messages } = await module.getCompilationInfo();
  for (const { lineNum, linePos, type, message } of messages) console.log(`${file}:${lineNum}:${linePos}: ${type}: ${message}`);
  // Limits: invocations and memory of a workgroup, numbers of bindings.
  device.createComputePipeline({ layout: 'auto', compute: { module, entryPoint: 'main' } });
  const error = await device.popErrorScope();
  if (!error) continue;
  refused += 1;
  if (!messages.some(({ type }) => type === 'error')) console.log(`${file}: ${error.message.split('\n')[0]}`);
}
console.log(`${files.length - refused} shaders are taken by Tint, ${refused} are refused`);
process.exit(refused ? 1 : 0);
