// A little Markdown as DOM nodes: paragraphs, headings, lists, quotes, fenced code, inline code, bold, italic.
//
// A model's output is never markup: text goes in as text nodes only, and links stay text. Blocks that have not changed
// since the call before keep their nodes, so that a long answer can be rendered as it grows.

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|(\*\*|__)(?=\S)([\s\S]*?\S)\3|(?<![\w*])(\*|_)(?=[^\s*_])([^*_\n]*?[^\s*_])\5(?![\w*])/g;

export function renderMarkdown(container, text) {
  const blocks = parse(text);
  const nodes = [...container.children];
  blocks.forEach((block, index) => {
    const source = JSON.stringify(block);
    const known = nodes[index];
    if (known && known.source === source) return;
    // Code that only grows keeps its node, and with it the reader's place in it.
    if (known && block.kind === "code" && known.kind === "code") {
      known.querySelector("code").textContent = block.text;
      known.source = source;
      return;
    }
    const node = build(block);
    node.source = source;
    node.kind = block.kind;
    if (known) known.replaceWith(node);
    else container.append(node);
  });
  nodes.slice(blocks.length).forEach((node) => node.remove());
}

function parse(text) {
  const blocks = [];
  let open = null; // what the next line may go on with
  let fence = null;
  for (const line of text.split("\n")) {
    if (fence) {
      const closing = line.match(FENCE);
      if (closing && closing[1].startsWith(fence) && !closing[2]) fence = null;
      else open.text += (open.lines++ ? "\n" : "") + line;
      continue;
    }
    const begins = line.match(FENCE);
    if (begins) {
      fence = begins[1];
      blocks.push((open = { kind: "code", language: begins[2], text: "", lines: 0 }));
      continue;
    }
    if (!line.trim()) {
      if (open?.kind !== "list") open = null;
      continue;
    }
    const heading = line.match(HEADING);
    if (heading) {
      blocks.push({ kind: "heading", level: heading[1].length, text: heading[2] });
      open = null;
      continue;
    }
    const item = line.match(ITEM);
    if (item) {
      const ordered = /\d/.test(item[2]);
      if (open?.kind !== "list" || (open.ordered !== ordered && !item[1])) {
        blocks.push((open = { kind: "list", ordered, start: parseInt(item[2], 10) || 1, items: [] }));
      }
      open.items.push({ depth: Math.min(3, Math.floor(item[1].length / 2)), text: item[3] });
      continue;
    }
    if (open?.kind === "list" && /^\s/.test(line)) {
      open.items[open.items.length - 1].text += "\n" + line.trim();
      continue;
    }
    const quoted = line.startsWith(">");
    const kind = quoted ? "quote" : "paragraph";
    const content = quoted ? line.replace(/^>\s?/, "") : line;
    if (open?.kind === kind) open.text += "\n" + content;
    else blocks.push((open = { kind, text: content }));
  }
  return blocks;
}

function build(block) {
  switch (block.kind) {
    case "code": {
      const figure = element("figure", "code");
      const pre = element("pre");
      pre.tabIndex = 0;
      pre.append(element("code", "", block.text));
      figure.append(element("figcaption", "", block.language || "code"), pre);
      return figure;
    }
    case "heading":
      return inline(element(`h${Math.min(6, block.level + 2)}`), block.text);
    case "quote":
      return inline(element("blockquote"), block.text);
    case "list": {
      const list = element(block.ordered ? "ol" : "ul");
      if (block.ordered) list.start = block.start;
      for (const item of block.items) list.append(inline(element("li", `depth-${item.depth}`), item.text));
      return list;
    }
    default:
      return inline(element("p"), block.text);
  }
}

function inline(parent, text) {
  let place = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(place, match.index));
    if (match[1]) parent.append(element("code", "", match[2].trim()));
    else if (match[3]) parent.append(inline(element("strong"), match[4]));
    else parent.append(inline(element("em"), match[6]));
    place = match.index + match[0].length;
  }
  parent.append(text.slice(place));
  return parent;
}

export function element(name, classes = "", text = "") {
  const node = document.createElement(name);
  if (classes) node.className = classes;
  if (text) node.textContent = text;
  return node;
}
