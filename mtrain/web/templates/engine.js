"use strict";
// Translations by the Bergamot engine, in a worker.
const site = {{ data }};
const waiting = new Map(), loaded = new Map();
let worker = null, ready = null, failure = null, calls = 0, turn = Promise.resolve();

const call = (name, ...args) => new Promise((accept, reject) => {
  if (failure) return reject(failure);
  waiting.set(++calls, { accept, reject });
  worker.postMessage({ id: calls, name, args });
});

// All calls fail, those that wait and those to come, until the engine is started again.
function end(message) {
  worker.terminate();
  failure = new Error(message);
  ready = null;
  waiting.forEach(({ reject }) => reject(failure));
  waiting.clear();
}

// Starts the engine, for the first time or after it has ended.
function open() {
  loaded.clear();
  failure = null;
  worker = new Worker("engine/translator-worker.js");
  worker.addEventListener("message", ({ data: { id, result, error } }) => {
    if (error && error.message.startsWith("Aborted")) return end(error.message);
    const { accept, reject } = waiting.get(id);
    waiting.delete(id);
    if (error) reject(new Error(error.message)); else accept(result);
  });
  worker.addEventListener("error", ({ message }) => end(message || "The engine does not start."));
  return call("initialize", { cacheSize: 16384 });
}

async function read(file) {
  const response = await fetch(file);
  if (!response.ok) throw new Error(`${file}: ${response.status} ${response.statusText}`);
  const data = await response.arrayBuffer();
  if (data.byteLength < 1000) throw new Error(`${file}: not a model file; perhaps a pointer of Git LFS`);
  return data;
}

function load({ source, target, folder, model, vocabularies, arithmetic, version }) {
  const key = `${source} ${target}`;
  if (!loaded.has(key)) loaded.set(key, (async () => {
    const files = [model, ...vocabularies].map((name) => read(`${folder}/${name}?${version}`));
    const [weights, ...vocabs] = await Promise.all(files);
    const contents = { model: weights, shortlist: new ArrayBuffer(0), vocabs, qualityModel: null };
    const config = { "gemm-precision": arithmetic };
    await call("loadTranslationModel", { from: source, to: target }, { ...contents, config });
  })());
  loaded.get(key).catch(() => loaded.delete(key));
  return loaded.get(key);
}

// Each word in an element, because the engine returns text only: these elements tell what a word translates.
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
const wrapped = (line, first) => line.replace(/[&<>]/g, (character) => ESCAPES[character])
  .replace(/\S+/g, (word) => `<i id="${first++}">${word}</i>`);

// Where words are: begin and end in characters, which are not UTF-16 units.
const length = (text) => [...text].length;
function wordsOf(text) {
  const words = [];
  let begin = 0;
  for (const part of text.split(/(\s+)/)) {
    const end = begin + length(part);
    if (/\S/.test(part)) words.push([begin, end]);
    begin = end;
  }
  return words;
}

// The translation of a line, and its alignments, which begin at a word of the source and a place in the target.
async function translateLine(line, pair, words, first, place) {
  const texts = [{ text: wrapped(line, first), html: true }];
  const [{ target }] = await call("translate", { models: [pair], texts });
  const body = new DOMParser().parseFromString(target.text, "text/html").body;
  const walker = document.createTreeWalker(body, NodeFilter.SHOW_TEXT), nodes = [];
  for (let begin = 0; walker.nextNode(); begin = nodes.at(-1).end) {
    const { data, parentElement } = walker.currentNode;
    nodes.push({ begin, end: begin + length(data), word: words[parentElement.id || -1] });
  }
  const alignments = [];
  for (const [begin, end] of wordsOf(body.textContent)) {
    const shared = (node) => Math.min(end, node.end) - Math.max(begin, node.begin);
    const { word } = nodes.reduce((best, node) => (shared(node) > shared(best) ? node : best));
    if (word) alignments.push([...word, place + begin, place + end]);
  }
  return [body.textContent, alignments];
}

async function translateLines(text, pair, signal) {
  const words = wordsOf(text), answer = { translatedText: "", alignments: [], alternatives: [] };
  let first = 0, place = 0;
  for (const [number, line] of text.split("\n").entries()) {
    if (signal.aborted) return null;
    const count = wordsOf(line).length;
    const [found, links] = count ? await translateLine(line, pair, words, first, place) : ["", []];
    answer.translatedText += number ? `\n${found}` : found;
    answer.alignments.push(...links);
    first += count;
    place += length(found) + 1;
  }
  return answer;
}

const backend = {
  // One text after the other: those that newer ones have replaced are skipped, or end after a line.
  translate({ q, source, target }, signal) {
    const text = q.replace(/[\0-\x08\x0b-\x1f\x7f]/g, " "); // the engine ends at some of these characters
    const answer = turn.then(async () => {
      if (signal.aborted) return null;
      await (ready ??= open());
      await load(site.models.find((model) => model.source === source && model.target === target));
      return translateLines(text, { from: source, to: target }, signal);
    });
    turn = answer.catch(() => {});
    return answer;
  },
  async start() {
    if (location.protocol === "file:")
      throw new Error("Browsers do not run the engine from files. Serve this folder: python -m http.server");
    await (ready ??= open());
    await load(site.models[0]);
    const [{ source, target }] = site.models;
    return { languages: site.languages, language: { source: { code: source }, target: { code: target } } };
  },
};
