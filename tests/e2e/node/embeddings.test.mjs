// OpenAI's SDK: embeddings. It asks for base64 of its own accord and decodes it.

import assert from 'node:assert/strict';
import { beforeEach, suite, test } from 'node:test';

import { Stand } from './stand.mjs';

const words = (embeddings) => ({
  answers: {
    '/v1/embeddings': {
      whole: JSON.stringify({
        object: 'list',
        model: 'native',
        data: embeddings.map((embedding, index) => ({ object: 'embedding', index, embedding })),
        usage: { prompt_tokens: 8, total_tokens: 8 },
      }),
    },
  },
});

suite('embeddings', () => {
  let stand;
  beforeEach(async () => { stand = await Stand.make('openai'); });

  test('texts become numbers and input is charged', async () => {
    const coded = [[0.5, -0.25], [1, 2]].map((numbers) => Buffer.from(new Float32Array(numbers).buffer).toString('base64'));
    await stand.upstream.play(words(coded));
    const answer = await stand.client().embeddings.create({ model: stand.solo, input: ['Hello', 'world'] });
    assert.deepEqual(answer.data.map((one) => [...one.embedding]), [[0.5, -0.25], [1, 2]]);
    const [asked] = await stand.upstream.asked();
    assert.deepEqual([asked.input, asked.encoding_format, asked.model], [['Hello', 'world'], 'base64', 'native']);
    await stand.paid(8 * 2_500);
  });

  test('plain numbers are the same to the last digit', async () => {
    const numbers = [0.1, -0.0123456789012345, 1e-7];
    await stand.upstream.play(words([numbers]));
    const answer = await stand.client().embeddings.create({ model: stand.solo, input: 'Hello', encoding_format: 'float' });
    assert.deepEqual(answer.data[0].embedding, numbers);
  });
});
