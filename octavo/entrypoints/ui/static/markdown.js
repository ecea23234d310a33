// Shows a model's Markdown: fenced and inline code, headings, lists, bold and italic text. Other marks, such as tables,
// stay as the model wrote them. Nodes are made one by one: nothing that a model writes becomes HTML.

const ITEM = /^( *)(?:[-*+]|(\d{1,9})[.)]) +(.*)$/;
const LINE_END = /\r\n|[\n\r\u2028\u2029]/; // all that `.` does not match
const HEADING = /^#{1,6} +(.*)$/;
const SPAN = /`([^`]+)`|\*\*([^*]+)\*\*|(?<!\w)\*([^*\s][^*]*)\*/g;

export function renderMarkdown(target, content) {
  target.replaceChildren();
  content.split("```").forEach((part, i) => (i % 2 ? target.append(fencedCode(part)) : addBlocks(target, part)));
}

function fencedCode(text) {
  const code = make("pre", [text.replace(/^[^\n]*\n/, "")]); // without the line that names the language
  code.tabIndex = 0;
  return code;
}

// Blocks bring their own breaks: only between two lines of prose the break of the text is kept.
function addBlocks(target, text) {
  let list = null, afterProse = false;
  for (const line of text.replace(/^\n/, "").split(LINE_END)) {
    const item = ITEM.exec(line), heading = HEADING.exec(line);
    if (list && !line.trim()) continue;
    if (item) {
      const tag = item[2] ? "OL" : "UL";
      if (list?.tagName !== tag) {
        list = make(tag, []);
        if (item[2]) list.start = Number(item[2]);
        target.append(list);
      }
      const entry = make("li", spansOf(item[3]));
      if (item[1].length > 1) entry.className = "deeper";
      list.append(entry);
    } else {
      list = null;
      if (afterProse && !heading) target.append("\n");
      if (heading) target.append(make("p", spansOf(heading[1]), "heading"));
      else for (const node of spansOf(line)) target.append(node);
    }
    afterProse = !item && !heading;
  }
}

function spansOf(line) {
  const nodes = [];
  let end = 0;
  for (const found of line.matchAll(SPAN)) {
    const [whole, code, bold, italic] = found;
    nodes.push(line.slice(end, found.index));
    if (code !== undefined) nodes.push(make("code", [code]));
    else nodes.push(bold !== undefined ? make("strong", spansOf(bold)) : make("em", spansOf(italic)));
    end = found.index + whole.length;
  }
  nodes.push(line.slice(end));
  return nodes;
}

function make(tag, nodes, className = "") {
  const element = document.createElement(tag);
  element.className = className;
  for (const node of nodes) element.append(node);
  return element;
}
