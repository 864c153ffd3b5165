const $ = (id) => document.getElementById(id);
let languages = [], timer = 0, running = null, shown = null, current = -1;

const element = (name, properties) => Object.assign(document.createElement(name), properties);
const say = (text, isError = false) =>
  Object.assign($("message"), { textContent: text, className: isError ? "muted error" : "muted" });

// A code of a model as a language tag: `zh-TW` for `zh_TW`.
const tagOf = (code) => code.replaceAll("_", "-");

// "auto" follows the first letter, which may be that of a foreign name.
function directionOf(code) {
  try {
    const locale = new Intl.Locale(tagOf(code));
    return (locale.getTextInfo?.() ?? locale.textInfo).direction;
  } catch { return "auto"; }  // of a browser or language without this information
}

function listTargets() {
  const from = $("from").value, before = $("to").value;
  const possible = new Set(languages.filter((each) => from === "auto" || each.code === from)
    .flatMap((each) => each.targets));
  $("to").replaceChildren(...languages.filter((each) => possible.has(each.code))
    .map((each) => new Option(each.name, each.code)));
  if (possible.has(before)) $("to").value = before;
}

async function translate() {
  if (!languages.length) return;  // until the backend has started
  if (running) running.abort();
  const q = $("source").value, source = $("from").value, target = $("to").value;
  if (!q.trim()) { running = null; document.body.classList.remove("busy"); say(""); return show(null); }
  const mine = running = new AbortController();
  document.body.classList.add("busy");
  try {
    const body = { q, source, target, alternatives: 3, alignments: true };
    if ($("key").value) body.api_key = $("key").value;
    const answer = await backend.translate(body, mine.signal);
    if (running !== mine) return;
    const found = answer.detectedLanguage && languages.find((x) => x.code === answer.detectedLanguage.language);
    say(found ? `Detected language: ${found.name}` : "");
    show({ q, target, ...answer });
  } catch (error) {
    if (running === mine) { show(null); say(error.message, true); }
  } finally {
    if (running === mine) document.body.classList.remove("busy");
  }
}

// Text as elements: spans are positions in characters, not in UTF-16 units.
function pieces(text, spans, name) {
  const characters = [...text], nodes = [];
  let done = 0;
  for (const [begin, end] of spans) {
    if (begin < done) continue;
    nodes.push(characters.slice(done, begin).join(""));
    nodes.push(element(name, { textContent: characters.slice(begin, end).join("") }));
    done = end;
  }
  return [...nodes, characters.slice(done).join("")];
}

function show(answer) {
  shown = answer;
  const { translatedText: text = "", alignments: links = [], alternatives: others = [] } = answer ?? {};
  const spans = [...new Map(links.map((link) => [link[2], link.slice(2)])).values()].sort((a, b) => a[0] - b[0]);
  $("target").replaceChildren(...pieces(text, spans, "span"));
  [...$("target").children].forEach((node, i) => { node.dataset.begin = spans[i][0]; });
  const dir = answer ? directionOf(answer.target) : "auto";
  if (answer) Object.assign($("target"), { lang: tagOf(answer.target), dir });
  const from = answer?.detectedLanguage?.language ?? $("from").value;
  $("source").lang = from === "auto" ? "" : tagOf(from);
  $("others").hidden = !others.length;
  $("alternatives").replaceChildren(
    ...others.map((each) => element("li", { dir, lang: $("target").lang, textContent: each })));
  $("hint").hidden = !text;
  point(-1);
}

function point(index) {
  const words = [...$("target").children];
  current = index;
  words.forEach((word, i) => { word.style.background = i === index ? "var(--mark)" : ""; });
  const links = index < 0 ? [] : shown.alignments.filter((link) => link[2] === +words[index].dataset.begin);
  const spans = links.map((link) => link.slice(0, 2)).sort((a, b) => a[0] - b[0]);
  const isSame = shown && shown.q === $("source").value;
  $("mirror").replaceChildren(...(isSame ? pieces(shown.q, spans, "mark") : []), "\n");
  $("mirror").scrollTop = $("source").scrollTop;
  const sources = spans.map(([begin, end]) => [...shown.q].slice(begin, end).join("")).join(" … ");
  $("aligned").replaceChildren(...(sources ? [
    element("bdi", { lang: $("target").lang, textContent: words[index].textContent }), " ← ",
    element("bdi", { lang: $("source").lang, textContent: sources }),
  ] : []));
}

const later = () => { clearTimeout(timer); timer = setTimeout(translate, 300); };
$("source").addEventListener("input", () => { point(-1); later(); });
$("source").addEventListener("scroll", () => { $("mirror").scrollTop = $("source").scrollTop; });
$("from").addEventListener("change", () => { listTargets(); translate(); });
$("to").addEventListener("change", translate);
$("key").addEventListener("change", translate);
$("keys").addEventListener("submit", (event) => event.preventDefault());
$("target").addEventListener("mouseover", (event) => point([...$("target").children].indexOf(event.target)));
["mouseleave", "blur"].forEach((name) => $("target").addEventListener(name, () => point(-1)));
$("target").addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const forward = getComputedStyle($("target")).direction === "rtl" ? -1 : 1;
  const step = { ArrowRight: forward, ArrowLeft: -forward }[event.key], count = $("target").children.length;
  const from = current < 0 && step < 0 ? 0 : current;
  if (step && count) { event.preventDefault(); point((from + step + count) % count); }
});
$("copy").addEventListener("click", async () => {
  if (!shown) return say("There is no translation to copy.", true);
  try { await navigator.clipboard.writeText(shown.translatedText); say("Copied."); }
  catch { say("The browser does not allow copying here.", true); }
});
$("swap").addEventListener("click", () => {
  const from = $("to").value, chosen = $("from").value;
  const to = chosen === "auto" ? shown?.detectedLanguage?.language : chosen;
  if (![...$("from").options].some((each) => each.value === from)) return say("There is no model for this.", true);
  $("from").value = from; listTargets();
  if ([...$("to").options].some((each) => each.value === to)) $("to").value = to;
  if (shown?.q === $("source").value && shown.target === from) $("source").value = shown.translatedText;
  translate();
});

(async () => {
  try {
    const settings = await backend.start();
    languages = settings.languages;
    const sources = languages.filter((each) => each.targets.length);
    const several = sources.length > 1 && backend.detects ? [new Option("Detect language", "auto")] : [];
    $("from").replaceChildren(...several, ...sources.map((each) => new Option(each.name, each.code)));
    $("from").value = settings.language.source.code;
    listTargets();
    $("to").value = settings.language.target.code;
    $("keys").hidden = !settings.keyRequired;
    const isReversible = ({ code, targets }) => sources.some((each) => targets.includes(each.code)
      && each.targets.includes(code));
    $("swap").hidden = !sources.some(isReversible);
    say("");
    if ($("source").value) translate();
  } catch (error) { say(error.message, true); }
})();
