// Talking to the server: addresses relative to the page, the key of this tab, errors as their messages.

const KEY = "octavo-api-key";

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0, "unreachable");
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`, code = null;
  try {
    ({ error: { message, code } } = await response.json());
  } catch { /* not an answer of ours: a proxy's, perhaps */ }
  throw new ApiError(message, response.status, code);
}

// The names that the server answers to; adapters have a parent.
export const getModels = async () => (await (await request("v1/models")).json()).data;

export const getStats = async () => (await request("ui/stats")).json();

// Yields the chunks of a streamed chat completion.
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ApiError("The server ended the answer too early.", 0, "cut");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue;
        const data = event.slice(6);
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message, 0, chunk.error.code);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the server stops if the reader has left
  }
}
