// SPDX-License-Identifier: Apache-2.0

package patchbay_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	patchbay "patchbay.example/go"
	pb "patchbay.example/go/v1"
)

// server is a running in_memory_guests. The program ends at the end of its standard input.
type server struct {
	t      *testing.T
	socket string
	stdin  io.WriteCloser
	stdout *bufio.Reader
}

func serve(t *testing.T, socket string, names ...string) *server {
	t.Helper()
	program := os.Getenv("PATCHBAY_TEST_GUESTS")
	if program == "" {
		t.Skip("PATCHBAY_TEST_GUESTS names no program; `cargo xtask test` sets it")
	}
	return startServer(t, program, socket, names...)
}

// startServer starts a program and waits until it prints "listening".
func startServer(t *testing.T, program, socket string, names ...string) *server {
	t.Helper()
	command := exec.Command(program, append([]string{socket}, names...)...)
	stdin, err := command.StdinPipe()
	must(t, err)
	stdout, err := command.StdoutPipe()
	must(t, err)
	must(t, command.Start())
	t.Cleanup(func() {
		stdin.Close()
		must(t, command.Wait())
	})
	s := &server{t, socket, stdin, bufio.NewReader(stdout)}
	s.expect("listening")
	return s
}

func (s *server) expect(want string) {
	s.t.Helper()
	if line, err := s.stdout.ReadString('\n'); err != nil || line != want+"\n" {
		s.t.Fatalf("the server said %q (%v), not %q", line, err, want)
	}
}

func (s *server) tell(command string) {
	s.t.Helper()
	_, err := io.WriteString(s.stdin, command+"\n")
	must(s.t, err)
	s.expect("done")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantReason(t *testing.T, err error, reason pb.ErrorReason) *patchbay.Error {
	t.Helper()
	var failed *patchbay.Error
	if !errors.As(err, &failed) || failed.Reason != reason {
		t.Fatalf("the error is %v, not %v", err, reason)
	}
	return failed
}

// patience returns a context with a deadline that no correct run reaches.
func patience(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// hostOfTwo returns a host with the guests db and web-1.
func hostOfTwo(t *testing.T) (*patchbay.Host, *server) {
	t.Helper()
	server := serve(t, filepath.Join(t.TempDir(), "all.sock"), "db", "web-1")
	host, err := patchbay.Connect(server.socket)
	must(t, err)
	t.Cleanup(func() { host.Close() })
	return host, server
}

func TestGuestsAreListedAndNamed(t *testing.T) {
	host, _ := hostOfTwo(t)
	ctx := patience(t)
	guests, err := patchbay.Collect(host.Guests(ctx))
	must(t, err)
	if len(guests) != 2 || guests[0].GetGuest() != "db" {
		t.Fatalf("guests %v", guests)
	}
	_, err = host.Guest("").Describe(ctx)
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_GUEST_NOT_NAMED)
	_, err = patchbay.Collect(host.Guest("web-7").List(ctx))
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_GUEST_NOT_FOUND)
}

func TestOpsChangeOneGuestOnly(t *testing.T) {
	host, _ := hostOfTwo(t)
	ctx := patience(t)
	web, db := host.Guest("web-1"), host.Guest("db")
	done, err := web.Enable(ctx, "alpha", "beta")
	must(t, err)
	if patched := done.GetSummary().GetSitesPatched(); patched != 4 {
		t.Fatalf("%d sites", patched)
	}
	on, err := web.Get(ctx, "beta")
	must(t, err)
	off, err := db.Get(ctx, "beta")
	must(t, err)
	if !on.GetEnabled() || off.GetEnabled() || len(on.GetSites()) != 3 {
		t.Fatalf("%v and %v", on, off)
	}
	keys, err := patchbay.Collect(web.List(ctx, "*a", "!beta"))
	must(t, err)
	if len(keys) != 1 || keys[0].GetName() != "alpha" {
		t.Fatalf("keys %v", keys)
	}
	_, err = web.Disable(ctx, "alp*")
	must(t, err)
	_, err = web.Inc(ctx, "betta")
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_KEY_NOT_FOUND)
	_, err = web.Enable(ctx)
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_INVALID_ARGUMENT)
}

func TestHoldsAreListedRenewedAndReleased(t *testing.T) {
	host, _ := hostOfTwo(t)
	ctx, web := patience(t), host.Guest("web-1")
	inc := patchbay.Changes(pb.KeyOp_KEY_OP_INC, "alpha")
	_, err := web.Update(ctx, inc, patchbay.Options{TTL: time.Hour, Reason: "canary"})
	must(t, err)
	holds, err := patchbay.Collect(web.Holds(ctx, "al*"))
	must(t, err)
	if len(holds) != 1 || holds[0].GetReason() != "canary" || holds[0].GetExpiresAt() == nil {
		t.Fatalf("holds %v", holds)
	}
	holds, err = web.Renew(ctx, 0, holds[0].GetId())
	must(t, err)
	if holds[0].GetExpiresAt() != nil {
		t.Fatalf("it still expires: %v", holds[0])
	}
	_, err = web.Release(ctx, holds[0].GetId())
	must(t, err)
	_, err = web.Release(ctx, holds[0].GetId())
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_HOLD_NOT_FOUND)
}

func TestAPlanIsCommittedAsPreparedOrGoesStale(t *testing.T) {
	host, _ := hostOfTwo(t)
	ctx, web := patience(t), host.Guest("web-1")
	plan, err := web.Prepare(ctx, patchbay.Changes(pb.KeyOp_KEY_OP_ENABLE, "alpha"), patchbay.Options{})
	must(t, err)
	done, err := web.Commit(ctx, plan)
	must(t, err)
	if done.GetResults()[0].GetCountAfter() != 1 {
		t.Fatalf("committed %v", done)
	}
	plan, err = web.Prepare(ctx, patchbay.Changes(pb.KeyOp_KEY_OP_DISABLE, "alpha"), patchbay.Options{})
	must(t, err)
	_, err = web.Inc(ctx, "alpha")
	must(t, err)
	_, err = web.Commit(ctx, plan)
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_PLAN_STALE)
}

func TestChangesAreWatchedUntilTheLoopIsLeft(t *testing.T) {
	host, _ := hostOfTwo(t)
	ctx, web := patience(t), host.Guest("web-1")
	var names []string
	for response, err := range web.WatchKeys(ctx, "", 0, "alpha") {
		must(t, err)
		if len(response.GetEvents()) == 0 {
			// This is the first response. Changes after it are watched.
			_, err := web.Inc(ctx, "beta", "alpha")
			must(t, err)
			continue
		}
		names = append(names, response.GetEvents()[0].GetName())
		break
	}
	if !slices.Equal(names, []string{"alpha"}) {
		t.Fatalf("events of %v", names)
	}
	_, err := patchbay.Collect(web.WatchKeys(ctx, "another", 1))
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_INCARNATION_CHANGED)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, err := range web.Watch(ctx) {
		// The watch ends without an error, because this client cancelled it.
		must(t, err)
		cancel()
	}
}

func TestABusyGuestIsAnErrorWithItsGate(t *testing.T) {
	host, server := hostOfTwo(t)
	ctx, web := patience(t), host.Guest("web-1")
	server.tell("busy web-1")
	enable := patchbay.Changes(pb.KeyOp_KEY_OP_ENABLE, "alpha")
	_, err := web.Update(ctx, enable, patchbay.Options{RetryTimeout: time.Second})
	failed := wantReason(t, err, pb.ErrorReason_ERROR_REASON_GUEST_BUSY)
	if failed.Gate() != pb.Gate_GATE_SYSTEM_STATE || failed.RetryAfter == 0 {
		t.Fatalf("%#v", failed)
	}
	server.tell("idle web-1")
	_, err = web.Enable(ctx, "alpha")
	must(t, err)
}

func TestTracingWithoutAnAgentIsUnavailable(t *testing.T) {
	host, _ := hostOfTwo(t)
	ctx, web := patience(t), host.Guest("web-1")
	_, err := web.Arm(ctx, "sched_switch")
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_NO_AGENT)
	_, err = patchbay.Collect(web.Trace(ctx, "sched_switch"))
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_NO_AGENT)
	_, err = patchbay.Collect(web.KernelLog(ctx))
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_NO_AGENT)
	_, err = web.Fire(ctx, "sched_switch")
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_NOT_ARMED)
}

func TestNobodyListeningHasNoReason(t *testing.T) {
	host, err := patchbay.Connect(filepath.Join(t.TempDir(), "nobody.sock"))
	must(t, err)
	defer host.Close()
	_, err = host.Guest("").Describe(patience(t))
	failed := wantReason(t, err, pb.ErrorReason_ERROR_REASON_UNSPECIFIED)
	if failed.Code != codes.Unavailable || failed.ReasonName != "" {
		t.Fatalf("%#v", failed)
	}
}

func TestACertificateDecidesWhatItsHolderMayDo(t *testing.T) {
	program := os.Getenv("PATCHBAY_TEST_DAEMON")
	if program == "" {
		t.Skip("PATCHBAY_TEST_DAEMON names no program; `cargo xtask test` sets it")
	}
	folder := t.TempDir()
	in := func(name string) string { return filepath.Join(folder, name) }
	must(t, os.Mkdir(in("run"), 0o755))
	serve(t, in("run/web-1.sock"), "web-1")
	for _, words := range []string{"init", "issue host --host localhost", "issue alice"} {
		arguments := append([]string{"certs"}, strings.Fields(words)...)
		must(t, exec.Command(program, append(arguments, "--folder", in("ca"))...).Run())
	}
	policy := "rules: [{name: op, principals: ['spiffe://patchbay.internal/alice'], role: operator, keys: ['alpha']}]"
	must(t, os.WriteFile(in("policy.yaml"), []byte(policy), 0o644))
	daemon := exec.Command(program, "--listen", "127.0.0.1:0", "--run-dir", in("run"),
		"--socket", in("node.sock"), "--policy", in("policy.yaml"),
		"--audit-log", in("audit.jsonl"), "--cert", in("ca/host.pem"),
		"--key", in("ca/host.key"), "--client-ca", "patchbay.internal="+in("ca/ca.pem"))
	stderr, err := daemon.StderrPipe()
	must(t, err)
	must(t, daemon.Start())
	t.Cleanup(func() {
		daemon.Process.Kill()
		daemon.Wait()
	})
	var address string
	for lines := bufio.NewScanner(stderr); address == "" && lines.Scan(); {
		var line struct{ Message, Address string }
		must(t, json.Unmarshal(lines.Bytes(), &line))
		address = line.Address
	}
	_, port, err := net.SplitHostPort(address)
	must(t, err)
	host, err := patchbay.ConnectTLS("localhost:"+port, patchbay.TLS{
		CA: in("ca/ca.pem"), Cert: in("ca/alice.pem"), Key: in("ca/alice.key"),
	})
	must(t, err)
	defer host.Close()
	ctx, guest := patience(t), host.Guest("web-1")
	var failed *patchbay.Error
	for {
		// The daemon listens before it has found its guests.
		_, err = guest.Enable(ctx, "alpha")
		if !errors.As(err, &failed) || failed.Reason != pb.ErrorReason_ERROR_REASON_GUEST_NOT_FOUND {
			break
		}
	}
	must(t, err)
	_, err = guest.Enable(ctx, "beta")
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_ROLE_MISSING)
}

// newer is a service that sends enum values, fields and reasons that this client does not know.
type newer struct {
	pb.UnimplementedStaticKeysServiceServer
}

// Field 2, key_class, is 99; field 1000, which no message of this version has, is 7.
var unknown = []byte{0x10, 99, 0xc0, 0x3e, 7}

func (newer) ListStaticKeys(context.Context, *pb.ListStaticKeysRequest) (*pb.ListStaticKeysResponse, error) {
	key := &pb.StaticKey{Name: "first"}
	err := proto.UnmarshalOptions{Merge: true}.Unmarshal(unknown, key)
	return &pb.ListStaticKeysResponse{Keys: []*pb.StaticKey{key}}, err
}

func (newer) UpdateStaticKeys(context.Context, *pb.UpdateStaticKeysRequest) (*pb.UpdateStaticKeysResponse, error) {
	answer, err := status.New(codes.Unavailable, "no").WithDetails(&errdetails.ErrorInfo{
		Reason: "GUEST_ASLEEP", Domain: "patchbay", Metadata: map[string]string{"gate": "MOON_PHASE"},
	})
	if err != nil {
		return nil, err
	}
	return nil, answer.Err()
}

// hostThat returns a client of a server with the services that the function registers.
func hostThat(t *testing.T, register func(*grpc.Server)) *patchbay.Host {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "host.sock")
	listener, err := net.Listen("unix", socket)
	must(t, err)
	server := grpc.NewServer()
	register(server)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	host, err := patchbay.Connect(socket)
	must(t, err)
	t.Cleanup(func() { host.Close() })
	return host
}

func TestWhatANewerServiceSendsIsKept(t *testing.T) {
	host := hostThat(t, func(server *grpc.Server) {
		pb.RegisterStaticKeysServiceServer(server, newer{})
	})
	ctx, guest := patience(t), host.Guest("any")
	keys, err := patchbay.Collect(guest.List(ctx))
	must(t, err)
	kept := keys[0].ProtoReflect().GetUnknown()
	if keys[0].GetKeyClass() != 99 || !slices.Equal([]byte(kept), unknown[2:]) {
		t.Fatalf("%v, unknown %v", keys[0], kept)
	}
	_, err = guest.Enable(ctx, "first")
	failed := wantReason(t, err, pb.ErrorReason_ERROR_REASON_UNSPECIFIED)
	if failed.ReasonName != "GUEST_ASLEEP" || failed.Gate() != pb.Gate_GATE_UNSPECIFIED {
		t.Fatalf("%#v", failed)
	}
	_, err = guest.Describe(ctx)
	if failed = wantReason(t, err, pb.ErrorReason_ERROR_REASON_UNSPECIFIED); failed.Code != codes.Unimplemented {
		t.Fatalf("%#v", failed)
	}
}

// logs is a service that sends one line of a kernel's log, and then the error for an absent agent.
type logs struct {
	pb.UnimplementedTracepointsServiceServer
}

func (logs) StreamKernelLog(request *pb.StreamKernelLogRequest, out grpc.ServerStreamingServer[pb.StreamKernelLogResponse]) error {
	record := &pb.KernelLogRecord{Level: 7, Text: "a line of " + request.GetGuest()}
	for _, response := range []*pb.StreamKernelLogResponse{
		{}, {Records: []*pb.KernelLogRecord{record}, Lost: 3},
	} {
		if err := out.Send(response); err != nil {
			return err
		}
	}
	answer, err := status.New(codes.Unavailable, "no").WithDetails(&errdetails.ErrorInfo{
		Reason: "NO_AGENT", Domain: "patchbay",
	})
	if err != nil {
		return err
	}
	return answer.Err()
}

func TestTheKernelsLogIsStreamedUntilTheAgentGoes(t *testing.T) {
	host := hostThat(t, func(server *grpc.Server) {
		pb.RegisterTracepointsServiceServer(server, logs{})
	})
	responses, err := patchbay.Collect(host.Guest("web-1").KernelLog(patience(t)))
	wantReason(t, err, pb.ErrorReason_ERROR_REASON_NO_AGENT)
	if len(responses) != 2 || len(responses[0].GetRecords()) != 0 || responses[1].GetLost() != 3 {
		t.Fatalf("responses %v", responses)
	}
	records := responses[1].GetRecords()
	if len(records) != 1 || records[0].GetLevel() != 7 || records[0].GetText() != "a line of web-1" {
		t.Fatalf("records %v", records)
	}
}

// TestEveryReasonComesThroughTheDaemon covers answers without a message, in which most errors
// arrive.
func TestEveryReasonComesThroughTheDaemon(t *testing.T) {
	program, refusing := os.Getenv("PATCHBAY_TEST_DAEMON"), os.Getenv("PATCHBAY_TEST_REFUSING")
	if program == "" || refusing == "" {
		t.Skip("PATCHBAY_TEST_REFUSING names no program; `cargo xtask test` sets it")
	}
	folder := t.TempDir()
	in := func(name string) string { return filepath.Join(folder, name) }
	must(t, os.Mkdir(in("run"), 0o755))
	startServer(t, refusing, in("run/refusing.sock"), "refusing")
	policy := fmt.Sprintf("rules: [{name: own, principals: ['uid:%d'], role: admin}]", os.Geteuid())
	must(t, os.WriteFile(in("policy.yaml"), []byte(policy), 0o644))
	daemon := exec.Command(program, "--run-dir", in("run"), "--socket", in("node.sock"),
		"--policy", in("policy.yaml"), "--audit-log", in("audit.jsonl"))
	stderr, err := daemon.StderrPipe()
	must(t, err)
	must(t, daemon.Start())
	t.Cleanup(func() {
		daemon.Process.Kill()
		daemon.Wait()
	})
	for lines := bufio.NewScanner(stderr); lines.Scan(); {
		if strings.Contains(lines.Text(), "guest found") {
			break
		}
	}
	go io.Copy(io.Discard, stderr)
	host, err := patchbay.Connect(in("node.sock"))
	must(t, err)
	defer host.Close()
	ctx, guest := patience(t), host.Guest("refusing")
	for number, name := range pb.ErrorReason_name {
		if number == 0 {
			continue
		}
		reason := strings.TrimPrefix(name, "ERROR_REASON_")
		_, ofUpdate := guest.Inc(ctx, reason)
		_, ofGet := guest.Get(ctx, reason)
		_, ofWatch := patchbay.Collect(guest.WatchKeys(ctx, "", 0, reason))
		for _, err := range []error{ofUpdate, ofGet, ofWatch} {
			failed := wantReason(t, err, pb.ErrorReason(number))
			if failed.Message != "refused with "+reason+": “100 %”\nas asked" ||
				failed.Metadata["near"] != "näher\nund näher" {
				t.Errorf("%#v", failed)
			}
		}
	}
}

// endless is a service whose lists have no last page.
type endless struct {
	pb.UnimplementedStaticKeysServiceServer
	pages int
	token string
}

func (e *endless) ListHolds(context.Context, *pb.ListHoldsRequest) (*pb.ListHoldsResponse, error) {
	e.pages++
	token := e.token
	if token == "" {
		token = fmt.Sprint(e.pages)
	}
	return &pb.ListHoldsResponse{NextPageToken: token}, nil
}

func TestAListThatNeverEndsIsGivenUp(t *testing.T) {
	for token, most := range map[string]int{"": 1000, "same": 2} {
		service := &endless{token: token}
		host := hostThat(t, func(server *grpc.Server) {
			pb.RegisterStaticKeysServiceServer(server, service)
		})
		_, err := patchbay.Collect(host.Guest("").Holds(patience(t)))
		if status.Code(err) != codes.ResourceExhausted || service.pages != most {
			t.Fatalf("%v after %d pages", err, service.pages)
		}
	}
}
