// A stream and a tool call with npm's `openai`: run it with node where `npm install openai` did.
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://localhost:8000/v1",
  apiKey: "none",
});
const model = (await client.models.list()).data[0].id;

const stream = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "What is the capital of France?" }],
  max_tokens: 32,
  temperature: 0,
  stream: true,
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
}

const called = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "What is the temperature in Paris?" }],
  max_tokens: 64,
  temperature: 0,
  tools: [
    {
      type: "function",
      function: {
        name: "temperature_of",
        parameters: {
          type: "object",
          properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
          required: ["city"],
        },
      },
    },
  ],
  tool_choice: "required",
  parallel_tool_calls: false,
});
const { name, arguments: given } = called.choices[0].message.tool_calls[0].function;
console.log(`\n${name}(${JSON.parse(given).city})`);
