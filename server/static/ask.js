// One request from the click to the last token: streamed, and sent again when a full server says when.

import { ServerError, streamChat } from "./api.js";
import { seconds } from "./dom.js";
import { bodyOf } from "./request.js";

const TRIES = 20;
const LONGEST = 120; // seconds: the share of a key may be one of a day

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => {
      clearTimeout(timer);
      reject(new DOMException("Stopped.", "AbortError"));
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, milliseconds);
    signal.addEventListener("abort", stop, { once: true });
  });
}

/** Ask and return {text, meta, finish_reason, diagnostics, applied, baseline, guard}. `said(text)` gets what is new, `waiting(text)`
 * why nothing comes yet, "" when it does. Raises ServerError, or AbortError. */
export async function ask(form, { signal, said, waiting }) {
  for (let tries = 1; ; tries += 1)
    try {
      return await stream(form, signal, said);
    } catch (error) {
      const { status, code, retryAfter, message } = error;
      if (status !== 429 || retryAfter === null || retryAfter > LONGEST || tries === TRIES) throw error;
      for (let left = Math.ceil(retryAfter); left > 0; left -= 1) {
        waiting(`${code?.startsWith("key_") ? message : "The server is full."} Retrying in ${left} s…`);
        await pause(1000, signal);
      }
      waiting("");
    }
}

async function stream(form, signal, said) {
  const started = performance.now();
  let [text, first, usage, ended] = ["", null, null, null];
  const body = bodyOf(form, (picture) => picture.url);
  if (body.guard) body.guard_stream = "first"; // a person would rather read than wait
  for await (const event of streamChat(body, signal)) {
    const choice = event.choices[0];
    usage = event.usage ?? usage;
    if (!choice) continue;
    if (choice.delta?.content) {
      first ??= performance.now();
      text += choice.delta.content;
      said(choice.delta.content);
    }
    if (choice.finish_reason) ended = choice;
  }
  if (!ended) throw new ServerError(500, { message: "The stream ended before the answer did." });
  const parts = [ended.finish_reason === "length" ? "cut at max tokens" : "complete"];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (first !== null) parts.push(`first after ${seconds((first - started) / 1000)}`);
  parts.push(`all ${seconds((performance.now() - started) / 1000)}`);
  const { finish_reason, diagnostics = null, applied = null, baseline = null, guard = null } = ended;
  if (guard) text = guard.answers[guard.kept].text;
  return { text, meta: parts.join(" · "), finish_reason, diagnostics, applied, baseline, guard };
}
