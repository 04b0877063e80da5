/* Local buffers that are not registered, where the kernel may refuse userfaultfd(2).
 *
 *   uncached PROV NODE ALLOWED|SECCOMP|UNPRIVILEGED
 *
 * SECCOMP: a filter answers EPERM to userfaultfd(2) and to the device's request, as the filters of
 * containers do. UNPRIVILEGED: kernels before 5.11, without privilege and with
 * vm.unprivileged_userfaultfd=0, do not have UFFD_USER_MODE_ONLY (EINVAL) and refuse other flags
 * (EPERM). Messages are sent in one domain, and then in two domains that are open at the same time.
 * The test that starts this program counts lines of the provider's log. */
#include "pair.h"

#include <stddef.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#define LENGTH 65536
#define USER_MODE_ONLY 1
#define USERFAULTFD_IOC_NEW 0xaa00

static void refuse(int old)
{
	const unsigned first = offsetof(struct seccomp_data, args[0]), second = offsetof(struct seccomp_data, args[1]);
	struct sock_filter steps[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_userfaultfd, 0, 4),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, first),
		BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, USER_MODE_ONLY, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)(old ? EINVAL : EPERM)),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_ioctl, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, second),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, USERFAULTFD_IOC_NEW, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof steps / sizeof *steps, .filter = steps };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		die("seccomp: %s", strerror(errno));
	/* make sure that the filter has an effect */
	if (syscall(__NR_userfaultfd, USER_MODE_ONLY) != -1 || errno != (old ? EINVAL : EPERM))
		die("the filter refuses nothing");
	if (syscall(__NR_userfaultfd, 0) != -1 || errno != EPERM)
		die("the filter refuses nothing without UFFD_USER_MODE_ONLY");
	if (ioctl(0, USERFAULTFD_IOC_NEW, 0) != -1 || errno != EPERM)
		die("the filter refuses no request");
}

static void use(struct pair *pair)
{
	uint8_t *from = malloc(LENGTH), *to = malloc(LENGTH);

	for (int round = 1; round <= 20; round++) {
		memset(from, round, LENGTH);
		transfer(pair, from, to, LENGTH);
	}
	free(from);
	free(to);
}

int main(int argc, char **argv)
{
	const int mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
	struct pair pairs[2];

	role = "uncached";
	if (argc != 4)
		die("usage: uncached PROV NODE ALLOWED|SECCOMP|UNPRIVILEGED");
	provider = argv[1];
	node = argv[2];
	alarm(120);
	if (strcmp(argv[3], "ALLOWED"))
		refuse(!strcmp(argv[3], "UNPRIVILEGED"));
	for (int count = 1; count <= 2; count++) {
		for (int i = 0; i < count; i++) {
			open_pair(&pairs[i], mr_mode);
			connect_pair(&pairs[i]);
		}
		for (int i = 0; i < count; i++)
			use(&pairs[i]);
		for (int i = 0; i < count; i++)
			close_pair(&pairs[i]);
	}
	printf("three domains sent the current bytes\n");
	return 0;
}
