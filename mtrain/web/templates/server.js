"use strict";
// Translations by `mtrain serve`.
async function ask(path, body, signal) {
  const sent = body && { method: "POST", headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body), signal };
  const response = await fetch(path, sent || undefined);
  const answer = await response.json().catch(() => ({}));  // a proxy may answer without JSON
  if (!response.ok) throw new Error(answer.error || `status ${response.status}`);
  return answer;
}

const backend = {
  detects: true,
  translate: (body, signal) => ask("translate", body, signal),
  async start() {
    try {
      return { ...await ask("frontend/settings"), languages: await ask("languages") };
    } catch (error) { throw new Error(`The server does not answer: ${error.message}`); }
  },
};
