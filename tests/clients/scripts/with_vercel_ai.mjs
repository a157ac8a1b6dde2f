// Vercel's AI SDK, with @ai-sdk/openai-compatible, @ai-sdk/openai and @ai-sdk/replicate.
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createReplicate } from "@ai-sdk/replicate";
import { generateImage, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { DIPTYCH_URL: url, IMAGE_MODEL: image, TEXT_MODEL: text, PICTURE: picture } = process.env;
const service = { baseURL: `${url}/v1`, apiKey: "none" };
const compatible = createOpenAICompatible({ name: "diptych", supportsStructuredOutputs: true, ...service });
const openai = createOpenAI(service);
const replicate = createReplicate({ baseURL: `${url}/v1`, apiToken: "none" });
const chat = { prompt: "a cat", maxOutputTokens: 20, maxRetries: 0 };
const schema = z.object({ happy: z.boolean() });
const draw = async (model, prompt = "a cat") => pngSize((await generateImage({ model, prompt, maxRetries: 0 })).image.uint8Array);

const calls = {
  generate: () => draw(compatible.imageModel(image)),
  edit: () => draw(compatible.imageModel(image), { text: "a hat", images: [readFileSync(picture)] }),
  generate_by_openai: () => draw(openai.image(image)),
  generate_by_replicate: () => draw(replicate.image(`diptych/${image}`)),
  chat: async () => (await generateText({ ...chat, model: compatible(text) })).text,
  stream: async () => await streamText({ ...chat, model: compatible(text) }).text,
  parse: async () => (await generateText({ ...chat, model: compatible(text), output: Output.object({ schema }) })).output.happy,
  tools: async () => {
    const tools = { Emoji: tool({ inputSchema: schema, execute: async ({ happy }) => typeof happy }) };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" });
    const stopWhen = stepCountIs(2);
    const result = streamText({ ...chat, maxOutputTokens: 60, model: compatible(text), tools, prepareStep, stopWhen });
    const steps = await result.steps;
    return [steps.length, steps[0].toolResults[0].output];
  },
  responses: async () => {
    const providerOptions = { openai: { store: false } };
    const whole = await generateText({ ...chat, model: openai(text), providerOptions });
    const streamed = await streamText({ ...chat, model: openai(text), providerOptions }).text;
    const output = Output.object({ schema });
    const parsed = (await generateText({ ...chat, model: openai(text), output, providerOptions })).output.happy;
    const tools = { Emoji: tool({ inputSchema: schema, execute: async ({ happy }) => typeof happy }) };
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" });
    const options = { ...chat, maxOutputTokens: 60, tools, prepareStep, stopWhen: stepCountIs(2), providerOptions };
    const steps = (await generateText({ ...options, model: openai(text) })).steps;
    return [Boolean(whole.text && streamed), typeof parsed, steps.length, steps[0].toolResults[0].output];
  },
  chat_by_openai: async () => (await generateText({ ...chat, model: openai.chat(text) })).text,
};
