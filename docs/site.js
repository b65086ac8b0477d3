// What screen readers and keyboards need beyond what Material does.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap")) wide.tabIndex = 0;
});

// What Material's search gets of what is typed. It finds all words that begin like one of
// these: a word itself counts more, and "a", "to" and their like aren't searched for.
const IGNORED = new Set(
  ("a an and are as at be by can do does for from how i if in into is it its me my nnx no of on or so that the their"
    + " this to up use using was we what when where which why will with").split(" "),
);

function searchQuery(typed) {
  if (/["+~^*]/.test(typed)) return typed; // operators of the search
  const words = typed.split(/[\s\-,:!=\[\]()`/]+|\.(?!\d)/).filter(Boolean);
  const kept = words.filter((word) => !IGNORED.has(word.toLowerCase()));
  return (kept.length ? kept : words).map((word) => `${word}^10 ${word}`).join(" ");
}

const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const isQuery = message?.type === 2 && typeof message.data === "string";
  post.call(this, isQuery ? { ...message, data: searchQuery(message.data) } : message, ...rest);
};
