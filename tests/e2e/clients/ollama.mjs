// What users of Ollama's JavaScript client write: `node ollama.mjs URL POOLING_URL`, as programs.py says.
import assert from 'node:assert'
import { Ollama } from 'ollama'

const [, , url, pooling] = process.argv
const [client, embedder] = [new Ollama({ host: url }), new Ollama({ host: pooling })]
const model = 'SmolLM2-135M-Instruct'
const messages = [{ role: 'user', content: 'What is the capital of France?' }]
const options = { num_predict: 12, temperature: 0 }

assert.deepStrictEqual((await client.list()).models.map((one) => one.name), [model])
assert((await client.show({ model })).capabilities.includes('tools'))
assert.strictEqual((await client.ps()).models[0].context_length, 4096)

const whole = await client.chat({ model, messages, options })
let text = ''
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  text += part.message.content
  if (part.done) assert(part.eval_count >= 1 && part.eval_duration >= 0 && part.prompt_eval_count > 1)
}
assert(text && text === whole.message.content)

const format = { type: 'object', properties: { age: { type: 'integer', maximum: 120 } }, required: ['age'] }
const found = await client.generate({ model, prompt: 'Ann is 3 years old.', format, options: { num_predict: 60 } })
if (found.done_reason === 'stop') assert(Number.isInteger(JSON.parse(found.response).age))
assert((await client.generate({ model, prompt: 'One, two,', raw: true, options })).done)

const vectors = (await embedder.embed({ model, input: ['a', 'b'] })).embeddings
assert(vectors.length === 2 && vectors[0].length === vectors[1].length)
assert.deepStrictEqual((await embedder.embeddings({ model, prompt: 'a' })).embedding.length, vectors[0].length)
await assert.rejects(client.chat({ model: 'nobody', messages }), /nobody/)
