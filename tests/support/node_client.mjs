// The OpenAI SDK for Node against a server: `node node_client.mjs BASE_URL` prints what came back as JSON.
import OpenAI, { BadRequestError, NotFoundError } from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];

async function failure(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  throw new Error("it did not fail");
}

const models = [];
for await (const model of client.models.list()) models.push(model.id);

const whole = await client.chat.completions.create({ model: "sql", messages, logprobs: true, top_logprobs: 2 });

const stream = await client.chat.completions.create({
  model: "sql", messages, stream: true, stream_options: { include_usage: true },
});
let streamed = "";
let usage = null;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const runner = client.chat.completions.stream({ model: "sql", messages });
const final = await runner.finalChatCompletion();

const completion = await client.completions.create({ model: "sql", prompt: "a", max_tokens: 50, echo: true, logprobs: 1 });
const retrieved = await client.models.retrieve("org/tiny");
const unknown = await failure(() => client.chat.completions.create({ model: "nope", messages }));
const long = await failure(() => client.completions.create({ model: "sql", prompt: "a".repeat(1000) }));

console.log(JSON.stringify({
  models, streamed,
  text: whole.choices[0].message.content,
  logprobs: whole.choices[0].logprobs.content.length,
  usage: usage.total_tokens === usage.prompt_tokens + usage.completion_tokens,
  final: final.choices[0].message.content,
  echoed: completion.choices[0].text,
  retrieved: retrieved.id,
  unknown: [unknown instanceof NotFoundError, unknown.code],
  long: [long instanceof BadRequestError, long.code],
}));
