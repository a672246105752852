// The page of `writehead serve`: it calls the server that it came from, and nothing else.
"use strict";

const TYPING_MS = 250; // after the last key, a translation starts
const RACE_TOKENS = 64; // per copy, if both models have that many positions
const SECONDS = 60; // that a plot shows
const TICK_MS = 1000; // between two readings of the metrics
const find = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, attributes);
  element.append(...children);
  return element;
}

// ---- the server

function headers() {
  const key = find("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function call(path, body, signal) {
  const options = { headers: headers(), signal };
  if (body) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (!response.ok) {
    const error = await response.json().catch(() => ({}));
    throw new Error(error.error?.message ?? error.error ?? `status ${response.status}`);
  }
  return response;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function say(id, text, failed = false) {
  find(id).textContent = text;
  find(id).classList.toggle("failed", failed);
}

// ---- translate as you type

let translating = null; // the AbortController of the request that runs
let timer = 0;

function number(id) {
  const field = find(id);
  const value = field.valueAsNumber;
  return Number.isFinite(value) ? Math.min(field.max, Math.max(field.min, value)) : 1;
}

function translateSoon(delay = TYPING_MS) {
  clearTimeout(timer);
  translating?.abort(); // the server frees the slot
  timer = setTimeout(translate, delay);
}

async function translate() {
  const text = find("source").value;
  const controller = (translating = new AbortController());
  if (!text.trim()) {
    show([]);
    say("translate-status", "");
    return;
  }
  const beam = number("beam");
  const options = { model: find("translator").value, beam, n_best: Math.min(beam, number("n-best")) };
  for (const [field, name] of [["from", "source"], ["to", "target"]]) {
    if (find(field).value) options[name] = find(field).value;
  }
  const began = performance.now();
  find("target").classList.add("busy");
  try {
    const lines = text.split("\n");
    const response = await call("v1/translate", { text: lines, ...options }, controller.signal);
    const answer = await response.json();
    show(answer.translations);
    const ms = Math.round(performance.now() - began);
    say("translate-status", `${answer.usage.completion_tokens} tokens in ${ms} ms`);
  } catch (error) {
    if (error.name !== "AbortError") say("translate-status", error.message, true);
  } finally {
    if (translating === controller) find("target").classList.remove("busy");
  }
}

function show(translations) {
  find("target").textContent = translations.map((one) => one.text).join("\n");
  const first = translations.find((one) => one.text) ?? { hypotheses: [] };
  find("beams").hidden = first.hypotheses.length < 2;
  const best = Math.max(...first.hypotheses.map((one) => one.score));
  find("hypotheses").replaceChildren(
    ...first.hypotheses.map((one) => {
      const meter = make("meter", { min: 0, max: 1, value: Math.exp(one.score - best) });
      meter.setAttribute("aria-label", "score relative to the best");
      const score = make("span", { className: "score" }, one.score.toFixed(3));
      return make("li", {}, one.text, " ", score, meter);
    }),
  );
  find("tree").replaceChildren(branches(first.hypotheses.map((one, i) => ({
    words: one.text.split(" "), score: one.score, isBest: i === 0,
  }))));
}

// hypotheses with the same beginning share a branch
function branches(hypotheses) {
  const groups = new Map();
  for (const one of hypotheses) {
    const word = one.words[0] ?? "";
    if (!groups.has(word)) groups.set(word, []);
    groups.get(word).push(one);
  }
  return make("ul", {}, ...[...groups.values()].map((group) => {
    let shared = 1;
    const [first] = group;
    const agree = (i) => group.every((one) => i < one.words.length && one.words[i] === first.words[i]);
    while (group.length > 1 ? agree(shared) : shared < first.words.length) shared += 1;
    const isBest = group.some((one) => one.isBest);
    const text = make("span", { className: isBest ? "best" : "" }, first.words.slice(0, shared).join(" "));
    if (group.length === 1) {
      return make("li", {}, text, make("span", { className: "leaf" }, first.score.toFixed(3)));
    }
    const rest = group.map((one) => ({ ...one, words: one.words.slice(shared) }));
    return make("li", {}, text, branches(rest));
  }));
}

// ---- continue a prompt, token by token

let writing = null;

async function write() {
  if (writing) return;
  const controller = (writing = new AbortController());
  find("generate").disabled = true;
  find("cancel").disabled = false;
  const output = find("continuation");
  const prompt = find("prompt").value;
  output.textContent = prompt;
  const began = performance.now();
  let pieces = 0;
  const report = (end) => {
    const seconds = (performance.now() - began) / 1000;
    say("write-status", `${pieces} pieces in ${seconds.toFixed(1)} s${end}`);
  };
  const body = {
    model: find("writer").value, prompt, stream: true,
    temperature: number("temperature"), max_tokens: number("tokens"),
  };
  try {
    const response = await call("v1/completions", body, controller.signal);
    for await (const event of events(response)) {
      const choice = event.choices[0];
      pieces += choice.text ? 1 : 0;
      output.append(choice.text);
      report(choice.finish_reason === "length" ? "; length limit" : "");
    }
  } catch (error) {
    if (error.name === "AbortError") report("; cancelled");
    else say("write-status", error.message, true);
  } finally {
    writing = null;
    find("generate").disabled = false;
    find("cancel").disabled = true;
  }
}

// ---- a race of two models

async function race(models, known) {
  const isText = models[0].translates;
  const text = (isText ? find("source") : find("prompt")).value.trim() || "The house is big.";
  const count = Number(find("copies").value);
  // texts of different lengths would not be a fair comparison
  const positions = models.map((one) => known.get(one.id)?.target_positions ?? RACE_TOKENS);
  const tokens = Math.min(RACE_TOKENS, ...positions);
  find("start").disabled = true;
  say("race-status", "");
  const rows = models.map((one) => {
    const bar = make("progress", { max: 1, value: 0 });
    bar.setAttribute("aria-label", one.id);
    const cells = [make("td", {}, one.id, bar), make("td"), make("td"), make("td")];
    const facts = known.get(one.id);
    if (facts) cells[3].textContent = `${bytes(facts.kv_bytes_per_token)} (${facts.attention})`;
    return { bar, cells, row: make("tr", {}, ...cells) };
  });
  find("lanes").replaceChildren(...rows.map((one) => one.row));
  try {
    for (const [i, one] of models.entries()) {
      const { bar, cells } = rows[i];
      bar.removeAttribute("value");
      let began = performance.now();
      const elapsed = () => (performance.now() - began) / 1000;
      const clock = setInterval(() => { cells[1].textContent = `${elapsed().toFixed(1)} s`; }, 100);
      try {
        const copies = Array(count).fill(text);
        const path = isText ? "v1/translate" : "v1/completions";
        const own = isText ? { text: copies, beam: 1, min_length: tokens, max_length: tokens }
          : { prompt: copies, temperature: 0, min_tokens: tokens, max_tokens: tokens };
        const run = async () => (await call(path, { model: one.id, ...own })).json();
        await run(); // makes room for the batch
        began = performance.now();
        const answer = await run();
        cells[1].textContent = `${elapsed().toFixed(2)} s`;
        const speed = answer.usage.completion_tokens / elapsed();
        cells[2].textContent = Math.round(speed).toLocaleString("en");
        bar.value = 1;
        bar.dataset.speed = speed;
      } finally {
        clearInterval(clock);
      }
    }
    const speeds = rows.map((one) => Number(one.bar.dataset.speed));
    const best = Math.max(...speeds);
    rows.forEach((one, i) => { one.bar.value = speeds[i] / best; });
    const factor = (best / Math.min(...speeds)).toFixed(2);
    const winner = models[speeds.indexOf(best)];
    say("race-status", `${winner.id} decodes ${factor} times as many tokens per second`);
  } catch (error) {
    say("race-status", error.message, true);
  } finally {
    find("start").disabled = false;
  }
}

// ---- live plots, from the metrics for Prometheus

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = count > 0 ? Math.min(4, Math.floor(Math.log10(count) / 3)) : 0;
  return `${Number((count / 1000 ** power).toPrecision(3))} ${units[power]}`;
}

const PLOTS = [
  { title: "tokens/s", words: (x) => Math.round(x).toLocaleString("en") },
  { title: "slots in use", words: (x) => `${(100 * x).toFixed(0)} %`, most: 1 },
  { title: "K/V in use", words: bytes },
];

function plot({ title }, names) {
  const value = make("b", {}, "–");
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${SECONDS} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title} in the last ${SECONDS} seconds`);
  const paths = names.map((_, i) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.classList.add(`c${i % 3}`);
    svg.append(path);
    return path;
  });
  const caption = make("figcaption", {}, title, value);
  find("plots").append(make("figure", {}, caption, svg));
  return { value, paths, history: names.map(() => []) };
}

function read(text, name, model) {
  const start = `writehead_${name}{model_name="${model}"} `;
  const line = text.split("\n").find((one) => one.startsWith(start));
  return line ? Number(line.slice(start.length)) : 0;
}

function watch(models) {
  const names = models.map((one) => one.id);
  const plots = PLOTS.map((one) => plot(one, names));
  if (names.length > 1) {
    const legend = names.map((name, i) => make("li", { className: `c${i % 3}` }, name));
    find("legend").replaceChildren(...legend);
  }
  let last = null;
  async function tick() {
    try {
      if (document.hidden) return;
      const text = await (await fetch("metrics")).text();
      const now = performance.now() / 1000;
      const counts = names.map((name) => read(text, "generation_tokens_total", name));
      if (last) {
        const speeds = counts.map((count, i) => (count - last.counts[i]) / (now - last.now));
        const usage = names.map((name) => read(text, "kv_cache_usage_perc", name));
        const used = names.map((name) => read(text, "kv_cache_bytes", name));
        [speeds, usage, used].forEach((values, i) => draw(plots[i], PLOTS[i], values));
      }
      last = { now, counts };
    } catch {
      last = null; // the server is away; try again
    } finally {
      setTimeout(tick, TICK_MS);
    }
  }
  tick();
}

function draw(one, { words, most }, values) {
  one.value.textContent = values.map(words).join(" | ");
  one.history.forEach((line, i) => {
    line.push(values[i]);
    if (line.length > SECONDS + 1) line.shift();
  });
  const top = most ?? Math.max(1e-9, ...one.history.flat());
  one.paths.forEach((path, i) => {
    const line = one.history[i];
    const points = line.map((y, x) => `${x + SECONDS + 1 - line.length},${97 - (94 * y) / top}`);
    path.setAttribute("d", `M${points.join("L")}`);
  });
}

// ---- the start

function fill(id, models) {
  const languages = (one) => (one.languages ? ` (${one.languages.join(" → ")})` : "");
  find(id).replaceChildren(
    ...models.map((one) => make("option", { value: one.id }, one.id + languages(one))),
  );
}

async function start() {
  const page = await (await fetch("page.json")).json();
  find("version").textContent = page.version;
  find("key-form").hidden = !page.needs_key;
  find("key").value = sessionStorage.getItem("key") ?? "";
  find("key-form").addEventListener("submit", (event) => event.preventDefault());
  find("key").addEventListener("change", () => sessionStorage.setItem("key", find("key").value));
  const translators = page.models.filter((one) => one.translates);
  const writers = page.models.filter((one) => !one.translates);
  find("translate").hidden = !translators.length;
  find("write").hidden = !writers.length;
  fill("translator", translators);
  fill("writer", writers);
  const offerLanguages = () => {
    const chosen = translators.find((one) => one.id === find("translator").value);
    ["from", "to"].forEach((field, i) => {
      const codes = chosen?.codes[i] ?? [];
      find(`${field}-field`).hidden = !codes.length;
      find(field).replaceChildren(...codes.map((code) => make("option", {}, code)));
    });
  };
  offerLanguages();
  find("translator").addEventListener("change", offerLanguages);
  find("source").addEventListener("input", () => translateSoon());
  for (const id of ["translator", "from", "to", "beam", "n-best"]) {
    find(id).addEventListener("change", () => translateSoon(0));
  }
  find("generate").addEventListener("click", write);
  find("cancel").addEventListener("click", () => writing?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") writing?.abort();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && writers.length) write();
  });
  if (page.compare) {
    const other = page.models.find((one) => one.id === page.compare);
    const first = page.models.find((one) => one !== other && one.translates === other.translates);
    find("race").hidden = !first;
    const known = new Map();
    find("start").addEventListener("click", async () => {
      if (!known.size) {
        const list = await call("v1/models").then((one) => one.json()).catch(() => ({ data: [] }));
        for (const one of list.data) known.set(one.id, one);
      }
      race([first, other], known);
    });
  }
  watch(page.models);
  document.body.dataset.ready = "yes";
}

start().catch((error) => say("translate-status", error.message, true));
