// Translates texts with the Bergamot engine of the npm package: node engine.cjs WORKER < request > answer
//
// WORKER is its worker/translator-worker.js. The request has file names and texts; the answer has translations.
const {readFileSync} = require('node:fs');
const {dirname, resolve} = require('node:path');

const worker = resolve(process.argv[2]);
const {model, vocabs, config, texts, html} = JSON.parse(readFileSync(0, 'utf-8'));
const read = (file) => {
    const bytes = readFileSync(file);
    return bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
};

// The worker is CommonJS in a package of modules, so Node cannot load it as a worker. It gets messages here.
let receive, reply;
const port = {on: (_, callback) => { receive = callback; }, postMessage: (message) => reply(message)};
const load = (name) => (name === 'node:worker_threads' ? {parentPort: port} : require(name));
new Function('require', '__dirname', '__filename', readFileSync(worker, 'utf-8'))(load, dirname(worker), worker);
const call = (name, ...args) => new Promise((accept, reject) => {
    reply = ({error, result}) => (error ? reject(new Error(error.message)) : accept(result));
    receive({id: 1, name, args});
});

(async () => {
    const pair = {from: 'a', to: 'b'};
    await call('initialize', {});
    const files = {model: read(model), shortlist: new ArrayBuffer(0), vocabs: vocabs.map(read), qualityModel: null};
    await call('loadTranslationModel', pair, {...files, config});
    const found = await call('translate', {models: [pair], texts: texts.map((text) => ({text, html}))});
    process.stdout.write(JSON.stringify(found.map(({target}) => target.text)));
})().catch((error) => {
    process.stderr.write(`${error.message}\n`);
    process.exit(1);
});
