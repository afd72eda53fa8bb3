// Questions to the server.

export class Lost extends Error {}
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(question, fields = {}) {
  let response, answer;
  try {
    const signal = AbortSignal.timeout(20000);
    response = await fetch(`/api/${question}?${new URLSearchParams(fields)}`, { signal, cache: "no-store" });
    answer = await response.json();
  } catch (error) {
    throw new Lost(String(error));
  }
  if (!response.ok) throw new Refused(response.status, answer.error);
  return answer;
}
