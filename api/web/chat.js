// The tab of a text model, and expanding a prompt: there where the server lists one.

import { announce, copy, make } from "./dom.js";
import * as service from "./service.js";

const EXPAND = "Write one short, vivid description of a picture, in one sentence, from these words: ";

/** Whether the model was trained to write prompts: then it is sent the words alone, and no conversation. */
export const writesPrompts = (model) => Boolean(model.diptych.expansion_instruction);

/** Begin a conversation in `tab`. `model` is an entry of /v1/models; `draw` is given a prompt. */
export function open(tab, model, draw) {
  const writer = writesPrompts(model);
  const talk = make("ul", { className: "talk" });
  talk.setAttribute("aria-live", "polite");
  const about = make("p", { className: "hint about", textContent: writer
    ? `${model.id} is a prompt writer: it turns a few words into a description to draw. It does not converse.`
    : `${model.id} answers here. What it writes can be drawn.` });
  const box = make("textarea", { rows: 2, placeholder: writer ? "a cat on the moon" : "Ask something" });
  box.setAttribute("aria-label", "Message");
  box.enterKeyHint = "send";
  const clear = make("button", { type: "button", className: "quiet", textContent: "Clear", hidden: true });
  const send = make("button", { className: "draw", textContent: writer ? "Write" : "Send" });
  const stop = make("button", { type: "button", className: "draw", textContent: "Stop", hidden: true });
  const error = make("p", { className: "error", hidden: true });
  error.setAttribute("role", "alert");
  const form = make("form", { noValidate: true }, make("div", { className: "prompt-box" }, box,
    make("div", { className: "prompt-foot" }, clear, make("span", { className: "grow" }), stop, send)));
  tab.replaceChildren(about, talk, form, error);
  let messages = [];
  let answering = null; // what stops the answer that comes

  const say = (role, words) => {
    const line = make("li", { className: role, textContent: words });
    talk.append(line);
    clear.hidden = false;
    line.scrollIntoView({ block: "nearest" });
    return line;
  };
  const busy = (controller) => {
    answering = controller;
    send.hidden = controller !== null;
    stop.hidden = controller === null;
  };
  const finish = (line) => {
    const answer = line.textContent;
    messages.push({ role: "assistant", content: answer });
    const again = make("button", { type: "button", textContent: "Draw this" });
    again.addEventListener("click", () => draw(answer));
    const copying = make("button", { type: "button", className: "quiet", textContent: "Copy" });
    copying.addEventListener("click", async () => {
      if (!await copy(answer, "The answer is copied.")) return;
      copying.textContent = "Copied";
      setTimeout(() => { copying.textContent = "Copy"; }, 2000);
    });
    line.append(make("div", { className: "row" }, again, copying));
    line.scrollIntoView({ block: "nearest" });
  };
  stop.addEventListener("click", () => answering?.abort());
  clear.addEventListener("click", () => {
    answering?.abort();
    messages = [];
    talk.replaceChildren();
    error.hidden = clear.hidden = true;
    announce("The conversation is cleared.");
    box.focus();
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const words = box.value.trim();
    if (!words || answering) return;
    const controller = new AbortController();
    busy(controller);
    box.value = "";
    error.hidden = true;
    messages.push({ role: "user", content: words });
    const asked = messages;
    say("user", words);
    const line = say("assistant", "");
    try {
      await service.chat(model.id, writer ? messages.slice(-1) : messages, (more) => (line.textContent += more), controller.signal);
    } catch (failure) {
      if (failure.name !== "AbortError") {
        error.textContent = failure.message;
        error.hidden = false;
      }
    } finally {
      busy(null);
    }
    if (asked !== messages) return; // cleared meanwhile
    if (line.textContent) finish(line);
    else {
      messages.pop();
      line.remove();
    }
  });
}

/** A prompt in more detail, as it comes. */
export async function expand(model, prompt, tell, signal) {
  let whole = "";
  const content = writesPrompts(model) ? prompt : EXPAND + prompt;
  await service.chat(model.id, [{ role: "user", content }], (more) => tell((whole += more)), signal);
}
