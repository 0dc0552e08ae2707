import { Model } from "kiln-web";

const [status, answer] = ["status", "answer"].map((id) => document.getElementById(id));
const source = new URLSearchParams(location.search).get("model") ?? "HuggingFaceTB/SmolLM2-135M-Instruct";
try {
    const onProgress = ({ stage, loaded, total }) => (status.textContent = `${stage}: ${loaded} of ${total ?? "?"}`);
    const model = await Model.load(source, { onProgress });
    status.textContent = model.facts.name;
    // The form of OpenAI's client.
    const messages = [{ role: "user", content: "Why is the sky blue?" }];
    const stream = await model.openai.chat.completions.create({ messages, max_tokens: 200, stream: true });
    for await (const { choices } of stream) answer.append(choices[0]?.delta.content ?? "");
} catch (error) {
    status.textContent = error.message;
}
