// The server's API: the key, JSON requests, and streamed answers.

import { read, write } from "./storage.js";

const KEY = "helmsight.key";
let stored = read("sessionStorage", KEY) ?? "";

export const storedKey = () => stored;

export function storeKey(key) {
  stored = key;
  write("sessionStorage", KEY, key || null);
}

/** An error as the server said it: message, param and code of its error object; `retryAfter` in seconds, where it told. */
export class ServerError extends Error {
  constructor(status, error, retryAfter = null) {
    super(error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.param = error?.param ?? null;
    this.code = error?.code ?? null;
    this.retryAfter = retryAfter;
  }
}

/** fetch with the key; raises ServerError. */
export async function send(path, options = {}) {
  const key = storedKey();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    document.dispatchEvent(new Event("helmsight:gone"));
    throw new ServerError(0, { message: "The server cannot be reached." });
  }
  if (response.ok) return response;
  const wait = Number.parseFloat(response.headers.get("Retry-After"));
  const { error } = (await response.json().catch(() => null)) ?? {};
  throw new ServerError(response.status, error, Number.isFinite(wait) ? wait : null);
}

export const getJson = async (path, signal) => (await send(path, { signal })).json();
export const getBlob = async (path) => (await send(path)).blob();

/** POST a chat with stream: true; yields the parsed events until [DONE]. */
export async function* streamChat(body, signal) {
  const response = await send("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (value.error) throw new ServerError(500, value.error);
    yield value;
  }
  throw new ServerError(500, { message: "The stream ended before the answer did." });
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (buffer + value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}
