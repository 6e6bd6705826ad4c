// The playground: one conversation through /v1/chat/completions, streamed. It lives in this tab's memory only.

import { Failure, ask, events } from "./events.js";
import { element, renderMarkdown } from "./markdown.js";

const byId = (id) => document.getElementById(id);
const SUGGESTIONS = [
  "Explain what a scheduler does, in three sentences.",
  "Write a haiku about the sea.",
  "What is the capital of France?",
  "Give me a short Python function that reverses a string.",
];
const ENDINGS = { length: "cut at max tokens", stop: "", tool_calls: "called a tool" };

export class Chat {
  // `onKeyNeeded` gets the gateway's words when it wants a key.
  constructor({ onKeyNeeded }) {
    this.onKeyNeeded = onKeyNeeded;
    this.exchanges = []; // {question, asked, answer}: its text, its node, the AnswerView
    this.running = null; // the AbortController of the answer under way
    this.follows = true; // the log scrolls along
    this.wire();
    this.adaptHeight();
    this.show();
  }

  wire() {
    const prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.send(prompt.value);
    });
    prompt.addEventListener("input", () => {
      this.adaptHeight();
      this.show();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send(prompt.value);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("new-chat").addEventListener("click", () => this.restart());
    byId("settings-button").addEventListener("click", () => {
      const settings = byId("settings");
      settings.hidden = !settings.hidden;
      byId("settings-button").setAttribute("aria-expanded", String(!settings.hidden));
      if (!settings.hidden) byId("system").focus();
    });
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
    for (const range of document.querySelectorAll(".range input")) {
      const say = () => (range.nextElementSibling.value = Number(range.value).toFixed(2));
      range.addEventListener("input", say);
      say();
    }
    const log = byId("log");
    log.addEventListener("scroll", () => {
      this.follows = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
      byId("to-latest").hidden = this.follows;
    });
    byId("to-latest").addEventListener("click", () => this.scroll(true));
    for (const text of SUGGESTIONS) {
      const button = element("button", "suggestion", text);
      button.type = "button";
      button.addEventListener("click", () => this.send(text));
      byId("suggestions").appendChild(element("li")).append(button);
    }
  }

  adaptHeight() {
    const prompt = byId("prompt");
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight, 200)}px`;
  }

  // Bring the controls in line with what is going on.
  show() {
    const running = this.running !== null;
    document.body.toggleAttribute("data-answering", running);
    byId("send-label").textContent = running ? "Stop" : "Send";
    byId("send").disabled = !running && !byId("prompt").value.trim();
    byId("log").setAttribute("aria-busy", String(running));
    byId("new-chat").disabled = !this.exchanges.length;
    byId("welcome").hidden = this.exchanges.length > 0;
  }

  restart() {
    this.stop();
    this.exchanges = [];
    for (const turn of document.querySelectorAll(".turn")) turn.remove();
    this.announce("New chat");
    this.follows = true;
    byId("to-latest").hidden = true;
    this.show();
    byId("prompt").focus();
  }

  stop() {
    this.running?.abort();
  }

  announce(text) {
    byId("announcement").textContent = text;
  }

  scroll(always = false) {
    if (always) this.follows = true;
    if (this.follows) byId("log").scrollTop = byId("log").scrollHeight;
  }

  options() {
    const options = {
      temperature: Number(byId("temperature").value),
      top_p: Number(byId("top-p").value),
    };
    for (const [id, field] of [["max-tokens", "max_tokens"], ["seed", "seed"]]) {
      const input = byId(id);
      if (input.value.trim() === "") continue;
      if (!input.checkValidity()) {
        byId("settings").hidden = false;
        input.focus();
        throw new Failure(`${input.labels[0].firstChild.textContent.trim()}: ${input.validationMessage}`);
      }
      options[field] = Number(input.value);
    }
    return options;
  }

  // What the model is told: the exchanges before this one that had an answer, and its question.
  messages(current) {
    const system = byId("system").value.trim();
    const told = system ? [{ role: "system", content: system }] : [];
    for (const exchange of this.exchanges) {
      if (exchange !== current && !exchange.answer.text) continue;
      told.push({ role: "user", content: exchange.question });
      if (exchange === current) break;
      told.push({ role: "assistant", content: exchange.answer.text });
    }
    return told;
  }

  async send(text) {
    const question = text.trim();
    if (!question || this.running) return;
    const exchange = { question, asked: element("article", "turn user", question), answer: null };
    this.exchanges.push(exchange);
    byId("log").append(exchange.asked);
    byId("prompt").value = "";
    this.adaptHeight();
    await this.answer(exchange);
  }

  // Answer a question once more: whatever came after it is dropped.
  async again(exchange) {
    if (this.running) return;
    for (const later of this.exchanges.splice(this.exchanges.indexOf(exchange) + 1)) {
      later.asked.remove();
      later.answer.node.remove();
    }
    exchange.answer.node.remove();
    await this.answer(exchange);
  }

  async answer(exchange) {
    const answer = (exchange.answer = new AnswerView());
    exchange.asked.after(answer.node);
    const running = (this.running = new AbortController());
    this.show();
    this.announce("Answering");
    this.scroll(true);
    let failure = null;
    try {
      await this.stream(exchange, running.signal);
    } catch (error) {
      failure = error;
    }
    this.running = null;
    const stopped = failure?.name === "AbortError";
    answer.end(stopped);
    if (failure && !stopped) this.fail(failure, answer);
    else this.announce(stopped ? "Stopped" : `Answer complete, ${answer.numTokens} tokens`);
    if (answer.text) answer.offer("Copy", (button) => copy(answer.text, button));
    answer.offer(failure && !stopped ? "Try again" : "Again", () => this.again(exchange));
    this.show();
    this.scroll();
  }

  async stream(exchange, signal) {
    const body = {
      messages: this.messages(exchange),
      ...this.options(),
      stream: true,
      stream_options: { include_usage: true },
    };
    const started = performance.now();
    const response = await ask("/v1/chat/completions", { body, signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(chunk.error.message);
      exchange.answer.take(chunk, performance.now() - started);
      this.scroll();
    }
    if (!exchange.answer.finishReason) throw new Failure("The connection broke before the answer was complete.");
  }

  fail(failure, answer) {
    // What is no failure of the gateway is a fault of this page: its words are for the console, too.
    if (!(failure instanceof Failure)) console.error(failure);
    answer.fail(failure.message);
    this.announce(`Error: ${failure.message}`);
    if (failure.status === 401) this.onKeyNeeded(failure.message);
  }
}

// One answer as it grows.
class AnswerView {
  constructor() {
    this.text = "";
    this.finishReason = null;
    this.usage = null;
    this.numChunks = 0;
    this.firstMs = null;
    this.lastMs = 0;
    this.drawing = false;
    this.node = element("article", "turn assistant pending");
    this.body = element("div", "body");
    this.foot = element("footer");
    this.meta = element("p", "meta");
    this.buttons = element("div", "buttons");
    this.foot.append(this.meta, this.buttons);
    this.node.append(this.body, this.foot);
  }

  get numTokens() {
    return this.usage?.completion_tokens ?? this.numChunks;
  }

  take(chunk, ms) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    const news = choice.delta?.content;
    if (!news) return;
    this.firstMs ??= ms;
    this.lastMs = ms;
    this.numChunks += 1;
    this.text += news;
    this.draw();
  }

  // At most once a frame, however quick the tokens come.
  draw() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.render();
    });
  }

  render() {
    renderMarkdown(this.body, this.text.trimStart());
    this.meta.textContent = this.said();
  }

  said(stopped = false) {
    if (this.firstMs === null) return stopped ? "stopped" : "";
    const seconds = (this.lastMs - this.firstMs) / 1000;
    const rate = seconds > 0 && this.numTokens > 1 ? (this.numTokens - 1) / seconds : null;
    const about = this.usage ? "" : "≈ ";
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    return [
      rate && `${about}${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tok/s`,
      `first token ${this.firstMs < 1000 ? `${Math.round(this.firstMs)} ms` : `${(this.firstMs / 1000).toFixed(1)} s`}`,
      this.usage
        ? `${this.usage.prompt_tokens} prompt${cached ? ` (${cached} cached)` : ""} + ${this.numTokens} output tokens`
        : `${about}${this.numTokens} tokens`,
      stopped ? "stopped" : ENDINGS[this.finishReason] ?? "",
    ]
      .filter(Boolean)
      .join(" · ");
  }

  end(stopped) {
    this.node.classList.remove("pending");
    this.render();
    this.meta.textContent = this.said(stopped);
  }

  fail(message) {
    const error = element("p", "error", message);
    this.body.after(error);
  }

  offer(name, act) {
    const button = element("button", "quiet", name);
    button.type = "button";
    button.addEventListener("click", () => act(button));
    this.buttons.append(button);
  }
}

async function copy(text, button) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copied = copyBySelection(text); // over plain HTTP browsers have no clipboard
  }
  button.textContent = copied ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function copyBySelection(text) {
  const area = element("textarea", "visually-hidden");
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}
