// The chat tab, and expanding a prompt: there where the server lists a text model.

import * as service from "./service.js";

const EXPAND = "Write one short, vivid description of a picture, in one sentence, from these words: ";
/** Whether the model was trained to expand prompts: then it is sent the prompt alone, and no conversation. */
const expandsPrompts = (model) => Boolean(model.diptych.expansion_instruction);

/** Fill the tab. `model` is an entry of /v1/models; `draw` is given a prompt. */
export function open(tab, model, draw) {
  tab.innerHTML = `
    <ul class="talk" aria-live="polite"></ul>
    <form novalidate><div class="prompt-box">
      <textarea rows="2" aria-label="Message" placeholder="Say something"></textarea>
      <div class="prompt-foot"><span class="grow"></span><button class="draw">Send</button></div>
    </div></form><p class="error" role="alert" hidden></p>`;
  const [talk, form, error] = [tab.querySelector(".talk"), tab.querySelector("form"), tab.querySelector(".error")];
  const box = tab.querySelector("textarea");
  const messages = [];
  const say = (role, words) => {
    const line = document.createElement("li");
    line.className = role;
    line.textContent = words;
    talk.append(line);
    line.scrollIntoView({ block: "nearest" });
    return line;
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const words = box.value.trim();
    if (!words) return;
    box.value = "";
    error.hidden = true;
    messages.push({ role: "user", content: words });
    say("user", words);
    const line = say("assistant", "");
    try {
      await service.chat(model.id, expandsPrompts(model) ? messages.slice(-1) : messages, (more) => (line.textContent += more));
      messages.push({ role: "assistant", content: line.textContent });
      const button = document.createElement("button");
      button.textContent = "Draw this";
      const prompt = line.textContent;
      button.addEventListener("click", () => draw(prompt));
      line.append(button);
    } catch (failure) {
      messages.pop();
      if (!line.textContent) line.remove();
      error.textContent = failure.message;
      error.hidden = false;
    }
  });
}

/** A prompt, told more fully, as it comes. */
export async function expand(model, prompt, tell) {
  let whole = "";
  const content = expandsPrompts(model) ? prompt : EXPAND + prompt;
  await service.chat(model.id, [{ role: "user", content }], (more) => tell((whole += more)));
}
