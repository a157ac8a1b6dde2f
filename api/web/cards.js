// What a model's card says, in words for people.

/** Whether the model reads a field of requests; a card without such a list reads all. */
export const reads = (card, name) => !card.fields || card.fields.includes(name);

/** Whether the model draws such requests: "text", "image" (with a source) or "mask". */
export const draws = (card, kind) => (!card.sources || card.sources.includes(kind)) && (kind !== "text" || !card.inpaint_only);

export const usualScheduler = (card) => card.defaults.scheduler ?? card.default_scheduler;

/** The largest guidance scale at which there is none. */
export const guidedAbove = (card) => card?.defaults.guided_above ?? 1;

/** The choices of a plan, each with how fast it is where the card has measured costs. */
export function planChoices(card, request) {
  const names = ["off", "auto", ...Object.keys(card.plans ?? {})];
  const usual = `model default (${card.plan || (isOff(card.deepcache) ? "off" : "DeepCache")})`;
  // With a plan the form does not say what is as the model has it, so that the plan can.
  const open = { ...request };
  for (const name of ["steps", "guidance_scale"]) if (open[name] === card.defaults[name]) delete open[name];
  const timed = names.map((name) => [name, speed(card, { ...open, plan: name })]);
  return [["", usual], ...timed.map(([name, ratio]) => [name, ratio ? `${name} (${ratio})` : name])];
}

/** What a request's plan makes of its steps: their number, how many run the whole network, how many have guidance. */
export function planSummary(card, request) {
  const { steps, deep, guided, rows, plan, measured } = work(card, request);
  const count = (flags) => flags.filter(Boolean).length;
  const words = [
    `${steps} steps`,
    count(deep) < steps ? `${count(deep)} of them in full, the others by DeepCache` : "all in full",
    rows === 1 ? "no guidance" : count(guided) < steps ? `guidance in ${count(guided)}` : "",
    plan.scheduler ? `sampler ${plan.scheduler}` : "",
    plan.schedule_type ? `${plan.schedule_type} schedule` : "",
    plan.vae === "tiny" ? "tiny VAE" : "",
  ];
  const ratio = speed(card, request);
  const faster = ratio ? ` ${measured ? "About" : "At least"} ${ratio} the speed of “off”.` : "";
  return `${words.filter(Boolean).join(", ")}.${faster}`;
}

/** How often as fast as with the plan "off" a request is, as "1.9×"; "" where that is 1, or nothing was measured. */
function speed(card, request) {
  const ratio = work(card, { ...request, plan: "off" }).seconds / work(card, request).seconds;
  return Number.isFinite(ratio) && Math.abs(ratio - 1) >= 0.05 ? `${ratio.toFixed(1)}×` : "";
}

const isOff = (deepcache) => !deepcache || deepcache === "off";

function planFields(card, name) {
  if (name === "off") return { deepcache: "off" };
  if (name === "auto") return card.plans?.balanced ?? { deepcache: "auto" };
  if (name) return card.plans?.[name] ?? {};
  return card.plan ? planFields(card, card.plan) : {};
}

/** DeepCache's schedule of a card or plan; null: every step is deep. As contract/plan.py. */
function schedule(deepcache) {
  if (isOff(deepcache)) return null;
  if (deepcache === "auto") return { interval: 2, depth: "resnet", first: 0, last: 1 };
  const [interval, depth] = typeof deepcache === "string" ? deepcache.split(":") : [];
  return { interval: 2, depth: "block", first: 0, last: 0, ...(interval ? { interval: Number(interval), depth: depth ?? "block" } : deepcache) };
}

/** The steps of a request, and the seconds of a worker that they take by the card's costs. As contract/estimates.py. */
function work(card, request) {
  const plan = { ...planFields(card, request.plan ?? "") };
  // A sampler or schedule of the request's own takes the place of the plan's, and of its steps.
  if (request.scheduler || request.schedule_type) for (const name of ["steps", "scheduler", "schedule_type"]) delete plan[name];
  const steps = request.steps ?? plan.steps ?? card.defaults.steps;
  const rows = (request.guidance_scale ?? card.defaults.guidance_scale) > guidedAbove(card) ? 2 : 1;
  const [start, stop] = plan.guidance_interval ?? [0, 1];
  const range = Array.from({ length: steps }, (_, k) => k);
  const given = range.map((k) => (plan.guided_steps
    ? plan.guided_steps.includes(k) : k >= Math.floor(start * steps) && k < Math.floor(stop * steps)));
  // What was not made for so few steps gives way.
  const fits = given.some(Boolean) && (plan.guided_steps ?? []).every((k) => k < steps);
  const guided = fits ? given : range.map(() => true);
  const planned = schedule(request.deepcache ?? plan.deepcache ?? card.deepcache);
  const cached = planned?.deep_steps?.some((k) => k >= steps) ? null : planned;
  const anchor = Math.max(cached?.first ?? 0, 1) - 1;
  const deep = range.map((k) => cached === null || (rows === 2 && k > 0 && guided[k] && !guided[k - 1]) || (cached.deep_steps
    ? k === 0 || cached.deep_steps.includes(k) : k <= anchor || k >= steps - cached.last || (k - anchor) % cached.interval === 0));
  const size = /^\d/.test(request.size ?? "") ? request.size : card.native_size;
  const deepS = ofSize(card.costs?.row_step_s, size);
  const shallow = cached && ofSize(card.costs?.shallow_row_step_s?.[cached.depth], size);
  const tiny = (request.vae ?? plan.vae) === "tiny" && card.costs?.vae_tiny_s;
  const seconds = (card.costs?.encode_s ?? 0) + (tiny || (card.costs?.vae_s ?? 0))
    + range.reduce((sum, k) => sum + (rows === 2 && guided[k] ? 2 : 1) * (deep[k] ? deepS : shallow || deepS), 0);
  // Shallow steps that were not measured count as deep ones, so that the speed is at least this.
  return { steps, deep, guided, rows, plan, seconds: deepS ? seconds : NaN, measured: deep.every(Boolean) || Boolean(shallow) };
}

/** A table's seconds at this size, scaled by the area from the nearest one that was measured. */
function ofSize(table, size) {
  if (!table || !Object.keys(table).length) return 0;
  if (table[size]) return table[size];
  const area = (name) => name.split("x").reduce((product, side) => product * Number(side), 1);
  const wanted = area(size);
  const [near, seconds] = Object.entries(table).sort(([a], [b]) => Math.abs(Math.log(area(a) / wanted)) - Math.abs(Math.log(area(b) / wanted)))[0];
  return (seconds * wanted) / area(near);
}
