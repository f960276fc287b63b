// A button that copies a string, or selects it if the page has no access to the clipboard.
const SAID_MS = 2000;

/** Copy the text content of an element, and report the result on the button. */
export async function copy(button, element) {
  const name = button.dataset.name ??= button.textContent;
  try {
    await navigator.clipboard.writeText(element.textContent);
    button.textContent = "Copied";
  } catch {  // no permission, or not a secure context: plain HTTP from another host
    getSelection().selectAllChildren(element);
    button.textContent = "Selected: Ctrl+C";
  }
  setTimeout(() => { button.textContent = name; }, SAID_MS);
}
