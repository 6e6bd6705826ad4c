// HTTP as the page needs it: the API key goes along, failures become one kind of error, events are read by fetch, since
// EventSource can send no key.

const KEY = "orca-api-key";

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

// A refusal or a failure, in words for people. `status` is that of HTTP, 0 where there was no answer.
export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// Ask the gateway; raises Failure unless it answers 200, and AbortError where `signal` says so.
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  const key = apiKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The gateway cannot be reached.");
  }
  if (response.ok) return response;
  let message = `The gateway answered ${response.status}.`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    // Something between the page and the gateway has answered.
  }
  throw new Failure(message, response.status);
}

// The data of each server-sent event, as text. Comments and other fields are skipped.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The connection broke.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
