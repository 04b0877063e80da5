# needs: weft
# soft0 between two processes of a user without privileges, where Yama denies them access to each
# other's memory: the owners' agents copy and log this, unless SOFTVERBS_PTRACER=1 permits the
# access. Without Yama's restriction there is no such log line.
run() {
	scope=/proc/sys/kernel/yama/ptrace_scope
	[ -e $scope ] || { echo "no Yama in this kernel"; return 1; }
	# the control: without the restriction the kernel permits another process of the same user
	echo 0 >$scope
	both "" && quiet || return 1
	echo 1 >$scope
	both "" && told || return 1
	both SOFTVERBS_PTRACER=1 && quiet
}

both() {
	nobody="setpriv --reuid 65534 --regid 65534 --clear-groups env FI_LOG_LEVEL=warn $1"
	: >/tmp/yama-server
	with weft $nobody "$FIPEER" -s -p weft -d soft0 transfer 127.0.0.1 >/tmp/yama-server 2>&1 &
	server=$!
	with weft $nobody "$FIPEER" -p weft -d soft0 transfer 127.0.0.1 >/tmp/yama-client 2>&1 || { cat /tmp/yama-client /tmp/yama-server; return 1; }
	wait $server || { cat /tmp/yama-client /tmp/yama-server; return 1; }
}

lines() { cat /tmp/yama-client /tmp/yama-server | grep -c 'slower copies'; }
told() { [ "$(lines)" -ge 1 ] || { echo "no log line about refused copies"; cat /tmp/yama-client; return 1; }; }
quiet() { [ "$(lines)" -eq 0 ] || { echo "copies were refused"; cat /tmp/yama-client; return 1; }; }
