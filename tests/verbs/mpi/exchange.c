/*
 * MPI over UCX on softverbs: point-to-point, collective and one-sided, with every byte checked.
 *
 * Each rank prints `rank R of N: all right`, or the error, and then exits with 1.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, size;

static void wrong(const char *what, long at)
{
	printf("rank %d of %d: %s is wrong at %ld\n", rank, size, what, at);
	fflush(stdout);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

static void *room(size_t len)
{
	void *bytes = malloc(len);

	if (!bytes)
		wrong("memory", (long)len);
	memset(bytes, 0x5a, len);
	return bytes;
}

/* The byte that `from` sends to `to` at offset `at` of message `tag`. */
static unsigned char expected(int from, int to, int tag, size_t at)
{
	return (unsigned char)(from * 101 + to * 57 + tag * 13 + at * 7 + (at >> 8));
}

static void fill(unsigned char *bytes, size_t len, int from, int to, int tag)
{
	for (size_t at = 0; at < len; at++)
		bytes[at] = expected(from, to, tag, at);
}

static void look(const char *what, const unsigned char *bytes, size_t len, int from, int to, int tag)
{
	for (size_t at = 0; at < len; at++)
		if (bytes[at] != expected(from, to, tag, at))
			wrong(what, (long)at);
}

/* Every rank with every other: eager, through rendezvous, and many at once; by wildcard and out of
 * order. */
static void point_to_point(void)
{
	static const size_t lens[] = {0, 1, 8, 63, 64, 1000, 4096, 8192, 8256, 65536, 1000003};

	for (size_t i = 0; i < sizeof(lens) / sizeof(*lens); i++) {
		size_t len = lens[i];
		int tag = (int)i;
		unsigned char *out = room(len + 1), *in = room(len + 1);

		for (int step = 1; step < size; step++) {
			int to = (rank + step) % size, from = (rank + size - step) % size;
			MPI_Status status;
			int count;

			fill(out, len, rank, to, tag);
			memset(in, 0x5a, len + 1);
			MPI_Sendrecv(out, (int)len, MPI_BYTE, to, tag, in, (int)len + 1, MPI_BYTE, from, tag,
				     MPI_COMM_WORLD, &status);
			MPI_Get_count(&status, MPI_BYTE, &count);
			if ((size_t)count != len || status.MPI_SOURCE != from)
				wrong("a message's length", count);
			look("a message", in, len, from, rank, tag);
			if (in[len] != 0x5a)
				wrong("what is behind a message", (long)len);
		}
		free(out);
		free(in);
	}

	enum { MANY = 200, LEN = 3000 };
	int to = (rank + 1) % size, from = (rank + size - 1) % size;
	unsigned char *out = room((size_t)MANY * LEN), *in = room((size_t)MANY * LEN);
	MPI_Request requests[2 * MANY];

	/* The last tag first: the messages before it are unexpected. */
	for (int i = 0; i < MANY; i++) {
		fill(out + (size_t)i * LEN, LEN, rank, to, i);
		MPI_Isend(out + (size_t)i * LEN, LEN, MPI_BYTE, to, i, MPI_COMM_WORLD, &requests[i]);
	}
	for (int i = MANY - 1; i >= 0; i--)
		MPI_Irecv(in + (size_t)i * LEN, LEN, MPI_BYTE, from, i, MPI_COMM_WORLD, &requests[MANY + i]);
	MPI_Waitall(2 * MANY, requests, MPI_STATUSES_IGNORE);
	for (int i = 0; i < MANY; i++)
		look("one of many", in + (size_t)i * LEN, LEN, from, rank, i);
	free(out);
	free(in);

	/* A rendezvous with a non-contiguous receive buffer, and one that is probed. */
	enum { ROWS = 300, WIDE = 400 };
	MPI_Datatype column;
	int *matrix = room(sizeof(int) * ROWS * WIDE), *got = room(sizeof(int) * ROWS);

	for (int i = 0; i < ROWS * WIDE; i++)
		matrix[i] = rank * 1000003 + i;
	MPI_Type_vector(ROWS, 1, WIDE, MPI_INT, &column);
	MPI_Type_commit(&column);
	MPI_Request request;
	MPI_Isend(matrix + 3, 1, column, to, 7, MPI_COMM_WORLD, &request);
	MPI_Status status;
	MPI_Probe(MPI_ANY_SOURCE, 7, MPI_COMM_WORLD, &status);
	MPI_Recv(got, ROWS, MPI_INT, status.MPI_SOURCE, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	MPI_Wait(&request, MPI_STATUS_IGNORE);
	for (int i = 0; i < ROWS; i++)
		if (got[i] != from * 1000003 + i * WIDE + 3)
			wrong("a column", i);
	MPI_Type_free(&column);
	free(matrix);
	free(got);
}

static void collectives(void)
{
	static const int counts[] = {1, 17, 5000, 200000};

	for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++) {
		int count = counts[i];
		int64_t *in = room(sizeof(*in) * (size_t)count * (size_t)size);
		int64_t *out = room(sizeof(*out) * (size_t)count * (size_t)size);

		for (int root = 0; root < size; root++) {
			for (int at = 0; at < count; at++)
				in[at] = rank == root ? root * 7 + at : -1;
			MPI_Bcast(in, count, MPI_INT64_T, root, MPI_COMM_WORLD);
			for (int at = 0; at < count; at++)
				if (in[at] != root * 7 + at)
					wrong("a broadcast", at);
		}
		for (int at = 0; at < count; at++)
			in[at] = (int64_t)at * (rank + 1);
		MPI_Allreduce(in, out, count, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
		for (int at = 0; at < count; at++)
			if (out[at] != (int64_t)at * size * (size + 1) / 2)
				wrong("a sum", at);
		for (int at = 0; at < count * size; at++)
			in[at] = rank * 1000000007LL + at;
		MPI_Alltoall(in, count, MPI_INT64_T, out, count, MPI_INT64_T, MPI_COMM_WORLD);
		for (int from = 0; from < size; from++)
			for (int at = 0; at < count; at++)
				if (out[from * count + at] != from * 1000000007LL + rank * count + at)
					wrong("what all sent to all", at);
		MPI_Allgather(in, count, MPI_INT64_T, out, count, MPI_INT64_T, MPI_COMM_WORLD);
		for (int from = 0; from < size; from++)
			for (int at = 0; at < count; at++)
				if (out[from * count + at] != from * 1000000007LL + at)
					wrong("what was gathered", at);
		free(in);
		free(out);
	}
	for (int i = 0; i < 50; i++)
		MPI_Barrier(MPI_COMM_WORLD);
}

static void one_sided(void)
{
	enum { WORDS = 40000 };
	int64_t *window_memory, *local = room(sizeof(*local) * WORDS);
	MPI_Win window;
	int to = (rank + 1) % size, from = (rank + size - 1) % size;

	MPI_Win_allocate(sizeof(int64_t) * (WORDS + 1), sizeof(int64_t), MPI_INFO_NULL, MPI_COMM_WORLD, &window_memory,
			 &window);
	memset(window_memory, 0, sizeof(int64_t) * (WORDS + 1));
	for (int at = 0; at < WORDS; at++)
		local[at] = rank * 65537LL + at;
	MPI_Win_fence(0, window);
	MPI_Put(local, WORDS, MPI_INT64_T, to, 0, WORDS, MPI_INT64_T, window);
	MPI_Win_fence(0, window);
	for (int at = 0; at < WORDS; at++)
		if (window_memory[at] != from * 65537LL + at)
			wrong("what was put", at);
	if (window_memory[WORDS] != 0)
		wrong("what is behind it", WORDS);
	MPI_Win_fence(0, window);
	memset(local, 0, sizeof(*local) * WORDS);
	MPI_Get(local, WORDS, MPI_INT64_T, from, 0, WORDS, MPI_INT64_T, window);
	MPI_Win_fence(0, window);
	for (int at = 0; at < WORDS; at++)
		if (local[at] != (from + size - 1) % size * 65537LL + at)
			wrong("what was got", at);

	/* All ranks count in a word of rank 0, which is passive; each number is returned once. */
	enum { ROUNDS = 100 };
	int64_t one = 1, before, last = -1, *mine = room(sizeof(*mine) * ROUNDS);

	MPI_Win_lock_all(0, window);
	for (int i = 0; i < ROUNDS; i++) {
		MPI_Fetch_and_op(&one, &before, MPI_INT64_T, 0, WORDS, MPI_SUM, window);
		MPI_Win_flush(0, window);
		if (before <= last || before >= (int64_t)ROUNDS * size)
			wrong("a word that is counted in", i);
		last = mine[i] = before;
	}
	MPI_Win_unlock_all(window);
	int64_t *all = room(sizeof(*all) * ROUNDS * (size_t)size), sum = 0;

	MPI_Gather(mine, ROUNDS, MPI_INT64_T, all, ROUNDS, MPI_INT64_T, 0, MPI_COMM_WORLD);
	if (rank == 0) {
		char *had = calloc((size_t)ROUNDS * (size_t)size, 1);

		for (int i = 0; had && i < ROUNDS * size; i++) {
			if (had[all[i]]++)
				wrong("a number that two had", i);
			sum += all[i];
		}
		int64_t n = (int64_t)ROUNDS * size;
		if (!had || sum != n * (n - 1) / 2)
			wrong("the sum of all numbers", sum);
		free(had);
	}
	MPI_Win_free(&window);
	free(local);
	free(mine);
	free(all);
}

int main(int argc, char **argv)
{
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &size);
	point_to_point();
	collectives();
	one_sided();
	MPI_Barrier(MPI_COMM_WORLD);
	printf("rank %d of %d: all right\n", rank, size);
	MPI_Finalize();
	return 0;
}
